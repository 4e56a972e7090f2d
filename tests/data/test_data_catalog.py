"""The catalogue of data sets: classes in the hub's order, and rows as on the hub."""

import datasets
import pytest
from internals import DATASETS, Reading, assets, load_tables

import fedjax_peft as fp
from fedjax_peft import tasks

LABELS = {
    "mrpc": "not_equivalent equivalent",
    "rte": "entailment not_entailment",
    "sst2": "negative positive",
    "qnli": "entailment not_entailment",
    "qqp": "not_duplicate duplicate",
    "mnli": "entailment neutral contradiction",
    "semeval2010_task8": (
        "Cause-Effect(e1,e2) Cause-Effect(e2,e1) Component-Whole(e1,e2) Component-Whole(e2,e1)"
        " Content-Container(e1,e2) Content-Container(e2,e1) Entity-Destination(e1,e2)"
        " Entity-Destination(e2,e1) Entity-Origin(e1,e2) Entity-Origin(e2,e1)"
        " Instrument-Agency(e1,e2) Instrument-Agency(e2,e1) Member-Collection(e1,e2)"
        " Member-Collection(e2,e1) Message-Topic(e1,e2) Message-Topic(e2,e1)"
        " Product-Producer(e1,e2) Product-Producer(e2,e1) Other"
    ),
    "wnut17": (
        "O B-corporation I-corporation B-creative-work I-creative-work B-group I-group B-location"
        " I-location B-person I-person B-product I-product"
    ),
    "ploner": "O B-PER I-PER B-ORG I-ORG B-LOC I-LOC",
    "emnist": (
        "0 1 2 3 4 5 6 7 8 9 A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"
        " a b c d e f g h i j k l m n o p q r s t u v w x y z"
    ),
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
}


@pytest.mark.parametrize("name", LABELS)
def test_classes_are_in_the_hubs_order(name):
    assert DATASETS[name].label_names == tuple(LABELS[name].split())


def test_classes_of_images():
    cifar = DATASETS["cifar100"].label_names
    assert (len(set(cifar)), list(cifar)) == (100, sorted(cifar))
    assert (cifar[0], cifar[23], cifar[99]) == ("apple", "cloud", "worm")
    names = DATASETS["fashion_mnist"].label_names
    assert (len(names), names[0], names[9]) == (10, "T - shirt / top", "Ankle boot")


@pytest.mark.parametrize("name", DATASETS)
def test_entries_are_complete(name):
    entry = DATASETS[name]
    assert entry.description
    assert "\n" not in entry.description
    assert entry.parts or entry.download
    assert set(entry.parts) <= DATASETS.keys()
    task = tasks.find(entry.task)()
    assert task.name == entry.task
    assert set(entry.columns.values()) <= {*task.encoder.columns, *entry.keys}
    assert bool(entry.shape) == (entry.task == "image_classification")
    assert entry.asset is None or assets.ASSETS[entry.asset].hub == entry.hub


def test_the_test_split_of_mnli_is_of_the_genres_of_its_training():
    glue = {name: x.test for name, x in DATASETS.items() if x.hub == "nyu-mll/glue"}
    assert glue.pop("mnli") == "validation_matched"
    assert set(glue.values()) == {"validation"}


def test_an_error_of_the_hubs_client_is_explained_too(monkeypatch):
    class ProxyError(Exception):  # those of httpx are no errors of the operating system
        """Of a proxy that refuses the hub."""

    def refused(*_args, **_options):
        raise ProxyError("403 Forbidden")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(fp.InputError, match=r"Face hub: ProxyError: 403 Forbidden\. To have it"):
        load_tables("sst2", Reading(source="hub"))


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if not entry.parts])
def test_errors_for_unreachable_data_name_the_download(monkeypatch, name):
    def offline(*_args, **_options):
        raise ConnectionError("no route") from OSError("cable\nis out")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(fp.InputError) as caught:
        load_tables(name, Reading(source="hub"))
    message = str(caught.value)
    assert ("hub: OSError: cable is out" in message) == bool(DATASETS[name].hub)
    assert DATASETS[name].download in message
    assert str(assets.cache_dir() / "data" / name) in message
