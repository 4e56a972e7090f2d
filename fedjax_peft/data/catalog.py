"""The named data sets: sources, columns, tasks, and the settings of papers.

A data set is one entry; :mod:`fedjax_peft.tasks.sources` reads it. The catalogue
is data: it does not import JAX.
"""

from collections.abc import Callable, Mapping
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, NamedTuple

from fedjax_peft.data import papers
from fedjax_peft.data.formats.client_lists import read_client_lists
from fedjax_peft.data.formats.conll import PLONER_SOURCES, read_conll, read_ploner
from fedjax_peft.data.formats.folders import read_orange, read_text_folders
from fedjax_peft.data.formats.glue import read_glue
from fedjax_peft.data.formats.h5 import read_h5
from fedjax_peft.data.formats.images import read_images
from fedjax_peft.data.formats.leaf import read_users
from fedjax_peft.data.formats.semeval import read_semeval
from fedjax_peft.data.formats.squad import read_mrqa, read_squad
from fedjax_peft.data.papers import Settings
from fedjax_peft.data.table import Table

Reader = Callable[..., dict[str, Table] | None]
"""folder -> tables by split (``train``, ``validation``, ``test``; ``all``: to be split), or None if
the folder is in another format. ``users``, ``user_examples`` and ``seed`` of ``load_dataset`` reach
it if it has keyword arguments of these names; it may then read the drawn users only."""


class Source(NamedTuple):
    """Where a data set comes from."""

    description: str
    task: Any = "classification"
    """The name of the task that is learned from it. Where rows are read, the task itself, whose
    encoder makes arrays of them (:class:`fedjax_peft.data.encoders.base.Encoded`)."""
    hub: str | None = None
    """Name on the Hugging Face hub; None: it is not there."""
    config: str | None = None
    """Its configuration, such as ``sst2`` of ``nyu-mll/glue``."""
    revision: str | None = None
    columns: Mapping[str, str] = {}
    """Column name on the hub and in files -> our name (:class:`fedjax_peft.data.table.Table`). If
    several columns have the same name of ours, the first one in this order is used."""
    label_names: tuple[str, ...] | None = None
    """All classes or tags in the hub's order; None: those of the training split, or of all rows if
    they have no test split."""
    test: str | None = "test"
    """The hub's split to test on; None: it has none, and a fifth of ``train`` is held out."""
    validation: str | None = None
    """The hub's split to validate on; None: it has none, or ``test`` is the one."""
    keys: Mapping[str, tuple[str, ...]] = {}
    """Columns to partition by that every row has -> their values; () if there are too many."""
    share: int | None = None
    """The largest number of rows of each ``source``, drawn at random before the split."""
    shape: tuple[int, ...] = ()
    """Shape of an image; () for texts."""
    asset: str | None = None
    """The asset (:data:`fedjax_peft.support.assets.ASSETS`) with the same data; None: none."""
    formats: tuple[Reader, ...] = ()
    """Readers of its folder, tried in this order before the common table formats."""
    download: str = ""
    """What to download by hand."""
    parts: tuple[str, ...] = ()
    """The data sets that it combines; () for a single data set."""
    examples: Mapping[str, tuple[int, int]] = {}
    """Way to split it ("" where there is one) -> examples of training and test, where the
    description does not state them."""
    users: int | None = None
    """Users, if they have equal numbers of training examples and their number is known."""
    settings: Settings = Settings()


def _glue(config: str, description: str, labels: str, columns: Mapping[str, str]) -> Source:
    """Returns an entry of GLUE; MNLI's test split is the one from the genres of its training."""
    return Source(
        f"GLUE {description} validation (test here)",
        hub="nyu-mll/glue",
        config=config,
        columns=columns,
        label_names=tuple(labels.split()),
        test="validation_matched" if config == "mnli" else "validation",
        formats=(read_glue,),
        download=(
            "the folder of this task from gluebenchmark.com/tasks (its train.tsv and dev.tsv, or"
            " dev_matched.tsv; for MRPC also Microsoft's two txt files), or the parquet files"
            f" of {config} from huggingface.co/datasets/nyu-mll/glue, named after their splits"
        ),
        settings=_GLUE_SETTINGS.get(config, Settings()),
    )


_PAIR = {"sentence1": "text", "sentence2": "text_pair"}
_GLUE = {
    "mrpc": ("MRPC, is it a paraphrase: 3,668 train, 408", "not_equivalent equivalent", _PAIR),
    "rte": ("RTE, does it follow: 2,490 train, 277", "entailment not_entailment", _PAIR),
    "sst2": (
        "SST-2, mood of a film review: 67,349 train, 872",
        "negative positive",
        {"sentence": "text"},
    ),
    "qnli": (
        "QNLI, is it the answer: 104,743 train, 5,463",
        "entailment not_entailment",
        {"question": "text", "sentence": "text_pair"},
    ),
    "qqp": (
        "QQP, the same question: 363,846 train, 40,430",
        "not_duplicate duplicate",
        {"question1": "text", "question2": "text_pair"},
    ),
    "mnli": (
        "MNLI, does it follow: 392,702 train, 9,815 matched",
        "entailment neutral contradiction",
        {"premise": "text", "hypothesis": "text_pair", **_PAIR},
    ),
}
"""Task -> description, classes, columns."""
_GLUE_SETTINGS = {
    "sst2": papers.fra([[0.9, 0.1], [0.1, 0.9]]),
    "mnli": papers.fra([[0.7, 0.3], [0.2, 0.8], [0.2, 0.8]]),
}


def _instructions(description: str, hub: str | None, **more: Any) -> Source:
    """Returns an entry of instructions and answers, by default without a test split."""
    usual: dict[str, Any] = {
        "test": None,
        "settings": Settings(512),
        "download": f"the data files from huggingface.co/datasets/{hub}, as one file called all",
    }
    return Source(description, task="instruction_tuning", hub=hub, **(usual | more))


_DOLLY = (
    "brainstorming classification closed_qa creative_writing general_qa information_extraction"
    " open_qa summarization"
)
_METAMATH = tuple(
    f"{source}_{kind}"
    for source in ("GSM", "MATH")
    for kind in ("AnsAug", "FOBAR", "Rephrased", "SV")
)
_NOUNS = (
    "Cause-Effect Component-Whole Content-Container Entity-Destination Entity-Origin"
    " Instrument-Agency Member-Collection Message-Topic Product-Producer"
)
_RELATIONS = (*(f"{r}({d})" for r in _NOUNS.split() for d in ("e1,e2", "e2,e1")), "Other")
_MRQA_SOURCES = "SQuAD NewsQA TriviaQA-web SearchQA HotpotQA NaturalQuestionsShort"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus"
    " butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch"
    " crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo"
    " keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse"
    " mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy"
    " porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper"
    " snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television"
    " tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


def _iob2(*types: str) -> tuple[str, ...]:
    return ("O", *(f"{place}-{kind}" for kind in types for place in "BI"))


DATASETS: dict[str, Source] = {
    "20newsgroups": Source(
        description="20 Newsgroups, topic of a Usenet post: 20 classes, 11,293 train, 7,528 test",
        hub="SetFit/20_newsgroups",
        columns={"label_text": "label"},
        asset="20newsgroups",
        formats=(read_orange, read_text_folders),
        download=(
            "20news-bydate.tar.gz from qwone.com/~jason/20Newsgroups (its folders"
            " 20news-bydate-train and 20news-bydate-test)"
        ),
        settings=papers.federa(256, 100, 10, 0.1, 1000),
    ),
    "semeval2010_task8": Source(
        description="SemEval-2010 task 8, 19 relations of two nouns: 8,000 train, 2,717 test",
        hub="SemEvalWorkshop/sem_eval_2010_task_8",
        columns={"sentence": "text", "relation": "label"},
        label_names=_RELATIONS,
        formats=(read_semeval,),
        download=(
            "SemEval2010_task8_all_data.zip of the task's organisers (TRAIN_FILE.TXT and"
            " TEST_FILE_FULL.TXT)"
        ),
        settings=papers.federa(64, 100, 10, 1.0, 1000),
    ),
    **{task: _glue(task, *row) for task, row in _GLUE.items()},
    "glue_silo": Source(
        description="six GLUE tasks, one for each client, of MRPC's size (FedMCP)",
        parts=("rte", "mrpc", "sst2", "qnli", "qqp", "mnli"),
        examples={"6:2:2": (13_885, 4_634), "fedpetuning": (20_830, 1_159)},
        settings=Settings(
            128, "FedMCP, experimental settings", {"name": "natural", "by": "task"}, 6, 25
        ),
    ),
    "wnut17": Source(
        description="WNUT 2017, rare entities: 6 types, 3,394 train, 1,009 validation, 1,287 test",
        task="tagging",
        hub="leondz/wnut_17",
        revision="refs/convert/parquet",  # the main one is a script, which datasets 5 does not run
        validation="validation",
        columns={"ner_tags": "tags"},
        label_names=_iob2("corporation", "creative-work", "group", "location", "person", "product"),
        formats=(read_conll,),
        download=(
            "wnut17train.conll, emerging.dev.conll and emerging.test.annotated from"
            " github.com/leondz/emerging_entities_17"
        ),
        settings=papers.federa(64, 30, 5, 0.1, 500, by="type_set"),
    ),
    "ploner": Source(
        description="PLONER, persons, places and organisations in eight sources of sentences",
        task="tagging",
        columns={"ner_tags": "tags"},
        label_names=_iob2("PER", "ORG", "LOC"),
        test=None,
        keys={"source": PLONER_SOURCES},
        formats=(read_ploner,),
        download=(
            "CoNLL-2003 (eng.train, eng.testa, eng.testb), WNUT16 (github.com/aritter/twitter_nlp,"
            " data/annotated/wnut16) and OntoNotes 5 (LDC2013T19) as words and tags in columns, in"
            " folders conll2003, wnut16, and bc, bn, mz, nw, tc, wb for the genres of OntoNotes"
        ),
        examples={"": (14_000, 3_500)},  # FeDeRA, Table 1
        settings=papers.federa(64, 100, 10, 0.01, 150, by="source_type_set"),
    ),
    "squad": Source(
        description="SQuAD 1.1, answers in a context: 87,599 train, 10,570 validation (test here)",
        task="question_answering",
        hub="rajpurkar/squad",
        test="validation",
        formats=(read_squad,),
        download="train-v1.1.json and dev-v1.1.json from rajpurkar.github.io/SQuAD-explorer",
        settings=papers.federa(384, 300, 15, 0.1, 100, by="cluster", clusters=30),
    ),
    "mrqa": Source(
        description="MRQA 2019, questions from six sources, an equal share of each",
        task="question_answering",
        hub="mrqa-workshop/mrqa",
        columns={"subset": "source", "qid": "id", "detected_answers": "answers"},
        test=None,
        keys={"source": tuple(_MRQA_SOURCES.split())},
        share=9_466,  # FeDeRA has 56,800 questions in all
        formats=(read_mrqa,),
        download=(
            "the six training files, SQuAD.jsonl.gz to NaturalQuestionsShort.jsonl.gz, linked in"
            " github.com/mrqa/MRQA-Shared-Task-2019"
        ),
        examples={"": (45_500, 11_300)},  # FeDeRA, Table 1
        settings=papers.federa(512, 300, 15, 0.01, 200, by="source"),
    ),
    "stack_overflow": Source(
        description="Stack Overflow by user, next token",
        task="next_token",
        test=None,
        keys={"client": ()},
        formats=(read_h5, read_users),
        download=(
            "TensorFlow Federated's stackoverflow.tar.bz2 (stackoverflow_train.h5 and"
            " stackoverflow_test.h5; users = 9 reads 9 users of them), or train.json and test.json:"
            ' {"user": {"tokens": ["a sentence", ...]}, ...}'
        ),
        settings=papers.fedadapters(64, 30),
    ),
    "shakespeare": Source(
        description="Shakespeare's plays by role, next token",
        task="next_token",
        hub="flwrlabs/shakespeare",
        # 4.2 million windows of 80 characters, each one further; y is the character after.
        columns={"character_id": "client", "x": "text"},
        test=None,
        keys={"client": ()},
        formats=(read_h5, read_users),
        download=(
            "LEAF's shakespeare (github.com/TalwalkarLab/leaf; its folders train and test), or"
            " TensorFlow Federated's shakespeare.tar.bz2 (its h5 files), or train.json and"
            ' test.json: {"role": {"snippets": ["a speech", ...]}, ...}'
        ),
        settings=papers.fedadapters(128, 30),
    ),
    "alpaca": _instructions(
        "Alpaca, instructions and answers by GPT-3: 52,002 rows",
        "tatsu-lab/alpaca",
        # 16 examples a client on average; a fifth of the rows is our test split.
        settings=papers.pfl({"name": "iid", "clients": 2600}),
    ),
    "alpaca_gpt4": _instructions(
        "Alpaca's instructions with answers by GPT-4: 52,002 rows",
        "vicgalle/alpaca-gpt4",
        settings=papers.flowertune("general", 20, 2),
    ),
    "dolly": _instructions(
        "Dolly-15k, instructions and answers by people, in 8 categories: 15,011 rows",
        "databricks/databricks-dolly-15k",
        keys={"category": tuple(_DOLLY.split())},
    ),
    "oasst1": _instructions(
        "OpenAssistant, conversations of people in 35 languages, the best of each tree",
        "OpenAssistant/oasst1",
        columns={"user_id": "author"},
        test="validation",
        keys={"lang": (), "author": ()},
        download=(
            "the parquet files from huggingface.co/datasets/OpenAssistant/oasst1, as train and"
            " validation"
        ),
        settings=papers.pfl({"name": "natural", "by": "author"}),
    ),
    "gsm8k": _instructions(
        "GSM8K, school mathematics with worked answers: 7,473 train, 1,319 test",
        "openai/gsm8k",
        config="main",
        columns={"question": "prompt", "answer": "completion"},
        test="test",
        download="train.jsonl and test.jsonl from github.com/openai/grade-school-math",
    ),
    "metamath": _instructions(
        "MetaMathQA, rewritten questions of GSM8K and MATH, in 8 types: 395,000 rows",
        "meta-math/MetaMathQA",
        columns={"query": "prompt", "response": "completion"},
        keys={"type": _METAMATH},
    ),
    "code_alpaca": _instructions(
        "CodeAlpaca, programming tasks and answers by GPT-3: 20,022 rows",
        "sahil2801/CodeAlpaca-20k",
        settings=papers.flowertune("code", 10, 2),
    ),
    "fingpt_sentiment": _instructions(
        "FinGPT, sentiment of financial news and tweets (3 or 7 levels) in words: 76,772 rows",
        "FinGPT/fingpt-sentiment-train",
        settings=papers.flowertune("finance", 50, 5),
    ),
    "medical_flashcards": _instructions(
        "Medical flash cards, questions and answers: 33,955 rows",
        "medalpaca/medical_meadow_medical_flashcards",
        # FlowerTune asks the column "input" alone. "instruction", one sentence for all, is a key.
        columns={"input": "prompt", "output": "completion"},
        settings=papers.flowertune("medical", 20, 2),
    ),
    "aya": _instructions(
        "Aya, instructions and answers in 65 languages by annotator: 202,362 train, 1,750 test",
        "CohereLabs/aya_dataset",
        columns={"inputs": "prompt", "targets": "completion", "user_id": "client"},
        test="test",
        keys={"client": (), "language": ()},
        download=(
            "the parquet files from huggingface.co/datasets/CohereLabs/aya_dataset, as train and"
            " test"
        ),
        settings=papers.pfl({"name": "natural"}),
    ),
    "fed_aya": _instructions(
        "Fed-Aya of FedLLM-Bench, 38 annotators of Aya, about 25,000 rows",
        None,
        keys={"client": ()},
        formats=(read_client_lists,),
        download=(
            "the data archive linked in github.com/rui-ye/FedLLM-Bench (its file"
            " Fed-Aya/aya_38c_25k.json alone)"
        ),
        settings=Settings(1024, "FedLLM-Bench, Fed-Aya", {"name": "natural"}, 4, 200),
    ),
    "emnist": Source(
        description="EMNIST by writer, handwritten characters: 62 classes",
        task="image_classification",
        hub="flwrlabs/femnist",
        columns={"writer_id": "client", "character": "label"},
        label_names=tuple(digits + ascii_uppercase + ascii_lowercase),
        test=None,
        keys={"client": ()},
        shape=(28, 28),
        formats=(read_h5, read_users, read_images),
        download=(
            "LEAF's femnist (github.com/TalwalkarLab/leaf; its folders train and test), or"
            " TensorFlow Federated's fed_emnist.tar.bz2 (its h5 files), or without"
            " writers EMNIST's gzip.zip from nist.gov/itl/products-and-services/emnist-dataset (the"
            " byclass files)"
        ),
        settings=papers.fedadapters(128, 50),
    ),
    "cifar100": Source(
        description="CIFAR-100, photographs: 100 classes, 50,000 train, 10,000 test",
        task="image_classification",
        hub="uoft-cs/cifar100",
        columns={"img": "image", "fine_label": "label", "image_jpeg": "image"},
        label_names=tuple(_CIFAR100.split()),
        users=500,  # of TensorFlow Federated's h5 files
        shape=(32, 32, 3),
        formats=(read_h5, read_users, read_images),
        download=(
            "cifar-100-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html, or with clients"
            " TensorFlow Federated's fed_cifar100.tar.bz2 (its h5 files)"
        ),
        settings=papers.fedadapters(128, 50),
    ),
    "cifar10": Source(
        description="CIFAR-10, photographs: 10 classes, 50,000 train, 10,000 test",
        task="image_classification",
        hub="uoft-cs/cifar10",
        columns={"img": "image", "image_jpeg": "image"},
        label_names=tuple(_CIFAR10.split()),
        shape=(32, 32, 3),
        formats=(read_h5, read_users, read_images),
        download="cifar-10-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html",
    ),
    "fashion_mnist": Source(
        description="Fashion-MNIST, pieces of clothing: 10 classes, 60,000 train, 10,000 test",
        task="image_classification",
        hub="zalando-datasets/fashion_mnist",
        label_names=(
            *("T - shirt / top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        shape=(28, 28),
        formats=(read_images,),
        download="the four idx files (.gz) from github.com/zalandoresearch/fashion-mnist",
    ),
}
"""The named data sets. Counts are those of the source that ``auto`` takes first."""

OWN = Source(
    description="a file or folder of the user's own",
    columns={"text": "text", "sentence": "text", "ner_tags": "tags", "img": "image"},
    formats=(read_h5, read_users, read_images),
)
"""The entry of a user's file or folder. Its task follows from its columns."""
