"""A short example of each public name, by module; a test runs the file as a script.

The reference shows the lines below ``# fp.NAME`` with the name, up to the next.
The objects here at the top are those of all examples.
"""

import jax
import numpy as np
import optax

import fedjax_peft as fp

optimizer = optax.adamw(1e-3)
data = fp.testing.tiny_dataset(100)
plain = fp.testing.tiny_model(classes=4, num_hidden_layers=1)
clients = fp.partition.iid(data, 10)
trace = "trace.csv"  # columns client, start, end

# fp.load_tokenizer
tokenizer = fp.load_tokenizer(fp.testing.write_tiny_checkpoint("tiny-bert"))

# fp.load_model
model = fp.load_model("tiny-bert", head=fp.heads.classification(4))

# fp.embed
vectors = fp.embed(model, ["a text", "another"], max_length=16)  # [2, width]

# fp.lora
model = fp.attach(plain, fp.lora(rank=4, targets=["query", "value"]))

# fp.quantize
small = fp.quantize(plain, "int8")

# fp.merge
merged = fp.merge(model)  # the adapter is in the weights

# fp.count
numbers = fp.count(plain.config, fp.lora(rank=4), head=fp.heads.classification(4))

# fp.Clients
clients = fp.Clients(data, (np.arange(60), np.arange(60, 100)), names=("a", "b"))

# fp.Dataset
alone = fp.Dataset({"x": np.eye(3), "labels": np.arange(3)}, ("a", "b", "c"))

# fp.combine
federation = fp.combine({"one": data, "two": data})  # a client for each

# fp.InputError
try:
    fp.lora(rank=0)
except fp.InputError as error:
    print(error)

# fp.TimeModel
time = fp.TimeModel(bandwidth_up=2e6, seconds_per_step=0.5, spread=1.0)

# fp.System
system = fp.System(time=time, failure_rate=0.1, deadline=30.0)

# fp.Placement
placement = fp.Placement(lanes=4, devices=1)

# fp.Evaluation
evaluation = fp.Evaluation(every=5, diagnostics=["variation"])

# fp.Records
records = fp.Records(on_round=print, checkpoint_every=10)

# fp.early_stop
stop = fp.early_stop(patience=5, metric="validation_accuracy")

# fp.grid
points = fp.grid(seed=range(3), learning_rate=[1e-3, 1e-2])  # six points

# fp.algorithms.apfl
algorithm = fp.algorithms.apfl(optimizer)

# fp.algorithms.centralised
algorithm = fp.algorithms.centralised(optimizer)

# fp.algorithms.ditto
algorithm = fp.algorithms.ditto(optimizer, lam=0.1)

# fp.algorithms.fedadagrad
algorithm = fp.algorithms.fedadagrad(optimizer)

# fp.algorithms.fedadam
algorithm = fp.algorithms.fedadam(optimizer)

# fp.algorithms.fedalt
algorithm = fp.algorithms.fedalt(optimizer)  # over fp.peft.mixed_lora()

# fp.algorithms.fedavg
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.fra())

# fp.algorithms.fedavgm
algorithm = fp.algorithms.fedavgm(optimizer)

# fp.algorithms.fedbabu
algorithm = fp.algorithms.fedbabu(optimizer)

# fp.algorithms.feddpa_f
algorithm = fp.algorithms.feddpa_f(optimizer)  # over fp.peft.dual_lora()

# fp.algorithms.feddpa_t
algorithm = fp.algorithms.feddpa_t(optimizer)  # over fp.peft.dual_lora()

# fp.algorithms.feddyn
algorithm = fp.algorithms.feddyn(optax.sgd(0.1))

# fp.algorithms.fedex
algorithm = fp.algorithms.fedex(optimizer)

# fp.algorithms.fedmatch
algorithm = fp.algorithms.fedmatch(optimizer)  # over fp.peft.dual()

# fp.algorithms.fedmcp
algorithm = fp.algorithms.fedmcp(optimizer)  # over fp.peft.dual()

# fp.algorithms.fedmomentum
algorithm = fp.algorithms.fedmomentum(optimizer)

# fp.algorithms.fednova
algorithm = fp.algorithms.fednova(optax.sgd(0.1))

# fp.algorithms.fedper
algorithm = fp.algorithms.fedper(optimizer)

# fp.algorithms.fedprox
algorithm = fp.algorithms.fedprox(optimizer, mu=0.01)

# fp.algorithms.fedrep
algorithm = fp.algorithms.fedrep(optimizer)

# fp.algorithms.fedrot
algorithm = fp.algorithms.fedrot(optimizer)

# fp.algorithms.fedsa
algorithm = fp.algorithms.fedsa(optimizer)

# fp.algorithms.fedsb
algorithm = fp.algorithms.fedsb(optimizer)  # over fp.peft.lora_sb()

# fp.algorithms.fedsvd
algorithm = fp.algorithms.fedsvd(optimizer)

# fp.algorithms.fedyogi
algorithm = fp.algorithms.fedyogi(optimizer)

# fp.algorithms.ffa
algorithm = fp.algorithms.ffa(optimizer)

# fp.algorithms.flora
algorithm = fp.algorithms.flora(optimizer)

# fp.algorithms.fra_ffa
algorithm = fp.algorithms.fra_ffa(optimizer, at=10)

# fp.algorithms.hetlora
algorithm = fp.algorithms.hetlora(optimizer, prune=0.99)

# fp.algorithms.hilora
algorithm = fp.algorithms.hilora(
    optimizer, clients=10, root_rounds=4, cluster_rounds=4
)  # over fp.peft.lora_sum()

# fp.algorithms.local
algorithm = fp.algorithms.local(optimizer)

# fp.algorithms.lora_a2
algorithm = fp.algorithms.lora_a2(optimizer, budget=2)

# fp.algorithms.moon
algorithm = fp.algorithms.moon(optimizer)

# fp.algorithms.pfedlora
algorithm = fp.algorithms.pfedlora(optimizer)  # over fp.peft.lora_with_base()

# fp.algorithms.pfedme
algorithm = fp.algorithms.pfedme(optax.sgd(0.1))

# fp.algorithms.ravan
algorithm = fp.algorithms.ravan(optimizer)  # over fp.peft.ravan()

# fp.algorithms.rolora
algorithm = fp.algorithms.rolora(optimizer)

# fp.algorithms.scaffold
algorithm = fp.algorithms.scaffold(optax.sgd(0.1), learning_rate=0.1)

# fp.algorithms.slora
algorithm = fp.algorithms.slora(optimizer, sparse_rounds=5)  # over fp.peft.slora()

# fp.aggregators.bulyan
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.bulyan(hostile=1)
)

# fp.aggregators.centred_clipping
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.centred_clipping()
)

# fp.aggregators.flexlora
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.flexlora())

# fp.aggregators.flora_na
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.flora_na())

# fp.aggregators.fltrust
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.fltrust(trusted=0)
)

# fp.aggregators.fra
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.fra())

# fp.aggregators.geometric_median
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.geometric_median()
)

# fp.aggregators.hetlora
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.hetlora())

# fp.aggregators.ilora
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.ilora())

# fp.aggregators.krum
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.krum(hostile=1)
)

# fp.aggregators.lora_fair
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.lora_fair())

# fp.aggregators.mean
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.mean())

# fp.aggregators.median
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.median())

# fp.aggregators.multi_krum
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.multi_krum(hostile=1)
)

# fp.aggregators.norm_bounding
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.norm_bounding()
)

# fp.aggregators.trimmed_mean
algorithm = fp.algorithms.fedavg(
    optimizer, aggregator=fp.aggregators.trimmed_mean(share=0.2)
)

# fp.transforms.clip_norm
transforms = [fp.transforms.clip_norm(1.0)]

# fp.transforms.flasc
transforms = [fp.transforms.flasc()]

# fp.transforms.int8
transforms = [fp.transforms.int8()]

# fp.transforms.nf4
transforms = [fp.transforms.nf4()]

# fp.transforms.power_sgd
transforms = [fp.transforms.power_sgd(rank=2)]

# fp.transforms.quantize
transforms = [fp.transforms.quantize(bits=4)]

# fp.transforms.random_k
transforms = [fp.transforms.random_k(0.1)]

# fp.transforms.sign
transforms = [fp.transforms.sign()]

# fp.transforms.ternary
transforms = [fp.transforms.ternary()]

# fp.transforms.top_directions
transforms = [fp.transforms.top_directions(rank=2)]

# fp.transforms.top_k
transforms = [fp.transforms.top_k(0.1)]

# fp.transforms.chain
transform = fp.transforms.chain(fp.transforms.top_k(0.1), fp.transforms.int8())

# fp.transforms.downlink
transforms = [fp.transforms.downlink(fp.transforms.int8())]

# fp.transforms.error_feedback
transforms = [fp.transforms.error_feedback(fp.transforms.nf4())]

# fp.attacks.alie
attack = fp.attacks.alie(share=0.3)

# fp.attacks.backdoor
attack = fp.attacks.backdoor(share=0.3, target=0, token=7)

# fp.attacks.gaussian
attack = fp.attacks.gaussian(share=0.3, std=1.0)

# fp.attacks.ipm
attack = fp.attacks.ipm(share=0.3)

# fp.attacks.label_flip
attack = fp.attacks.label_flip(share=0.3)

# fp.attacks.min_max
attack = fp.attacks.min_max(share=0.3)

# fp.attacks.scaled
attack = fp.attacks.scaled(share=0.3, factor=10.0)

# fp.attacks.sign_flip
attack = fp.attacks.sign_flip(share=0.3)

# fp.peft.bitfit
model = fp.attach(plain, fp.peft.bitfit())

# fp.peft.bottleneck
model = fp.attach(plain, fp.peft.bottleneck())

# fp.peft.dora
model = fp.attach(plain, fp.peft.dora())

# fp.peft.dual
model = fp.attach(plain, fp.peft.dual())

# fp.peft.dual_lora
model = fp.attach(plain, fp.peft.dual_lora())

# fp.peft.full
model = fp.attach(plain, fp.peft.full())

# fp.peft.head_only
model = fp.attach(plain, fp.peft.head_only())

# fp.peft.houlsby
model = fp.attach(plain, fp.peft.houlsby())

# fp.peft.ia3
model = fp.attach(plain, fp.peft.ia3())

# fp.peft.layer_norm
model = fp.attach(plain, fp.peft.layer_norm())

# fp.peft.lora
model = fp.attach(plain, fp.peft.lora())

# fp.peft.lora_sb
model = fp.attach(plain, fp.peft.lora_sb(rank=4))

# fp.peft.lora_sum
model = fp.attach(plain, fp.peft.lora_sum())

# fp.peft.lora_with_base
model = fp.attach(plain, fp.peft.lora_with_base())

# fp.peft.mixed_lora
model = fp.attach(plain, fp.peft.mixed_lora())

# fp.peft.opendelta
model = fp.attach(plain, fp.peft.opendelta())

# fp.peft.pfeiffer
model = fp.attach(plain, fp.peft.pfeiffer())

# fp.peft.prefix_tuning
model = fp.attach(plain, fp.peft.prefix_tuning())

# fp.peft.prompt_tuning
model = fp.attach(plain, fp.peft.prompt_tuning())

# fp.peft.ravan
model = fp.attach(plain, fp.peft.ravan(rank=4))

# fp.peft.slora
model = fp.attach(plain, fp.peft.slora())

# fp.privacy.adaptive
privacy = fp.privacy.adaptive(clip=0.1, noise_multiplier=1.0)

# fp.privacy.central
privacy = fp.privacy.central(clip=0.5, noise_multiplier=1.0)

# fp.privacy.correlated
privacy = fp.privacy.correlated(clip=0.5, noise_multiplier=1.0, rounds=20)

# fp.privacy.distributed
privacy = fp.privacy.distributed(clip=0.5, noise_multiplier=1.0)

# fp.privacy.example
privacy = fp.privacy.example(clip=0.5, noise_multiplier=1.0)

# fp.privacy.laplace
privacy = fp.privacy.laplace(clip=0.5, noise_multiplier=1.0)

# fp.privacy.local
privacy = fp.privacy.local(clip=0.5, noise_multiplier=1.0)

# fp.privacy.paper_noise
privacy = fp.privacy.paper_noise(std=0.01)

# fp.asynchronous.fedasync
server = fp.asynchronous.fedasync()

# fp.asynchronous.fedbuff
server = fp.asynchronous.fedbuff()

# fp.asynchronous.semi_synchronous
server = fp.asynchronous.semi_synchronous(period=60.0)

# fp.availability.diurnal
system = fp.System(
    time=time, availability=fp.availability.diurnal(period=86_400, share=0.4)
)

# fp.availability.markov
system = fp.System(time=time, availability=fp.availability.markov(60.0, 20.0))

# fp.availability.trace
system = fp.System(time=time, availability=fp.availability.trace(trace))

# fp.schedules.constant
schedule = fp.schedules.constant()

# fp.schedules.cosine
schedule = fp.schedules.cosine(rounds=100)

# fp.schedules.exponential
schedule = fp.schedules.exponential(0.99)

# fp.schedules.linear
schedule = fp.schedules.linear(rounds=100)

# fp.tasks.classification
task = fp.tasks.classification()

# fp.tasks.image_classification
task = fp.tasks.image_classification()

# fp.tasks.instruction_tuning
task = fp.tasks.instruction_tuning()

# fp.tasks.multiple_choice
task = fp.tasks.multiple_choice()

# fp.tasks.next_token
task = fp.tasks.next_token()

# fp.tasks.question_answering
task = fp.tasks.question_answering()

# fp.tasks.tagging
task = fp.tasks.tagging()

# fp.heads.causal_lm
head = fp.heads.causal_lm()

# fp.heads.classification
head = fp.heads.classification(["no", "yes"])

# fp.heads.make
head = fp.heads.make("classification", 4)

# fp.heads.span_classification
head = fp.heads.span_classification()

# fp.heads.token_classification
head = fp.heads.token_classification(["O", "B-PER", "I-PER"])

# fp.heads.two_classifiers
head = fp.heads.two_classifiers(4)

# fp.partition.dirichlet
clients = fp.partition.dirichlet(data, clients=10, alpha=0.3)

# fp.partition.grouped
users = fp.Dataset(
    data.columns, data.label_names, meta={"client": np.arange(100) % 9}
)
clients = fp.partition.grouped(users, groups=3)

# fp.partition.natural
clients = fp.partition.natural(users, by="client")

# fp.partition.iid
clients = fp.partition.iid(data, clients=10)

# fp.partition.pathological
clients = fp.partition.pathological(data, clients=10, classes_per_client=2)

# fp.partition.quantity
clients = fp.partition.quantity(data, clients=10, alpha=0.5)

# fp.partition.label_share
clients = fp.partition.label_share(
    data, shares=[[0.7, 0.3], [0.1, 0.9], [0.5, 0.5], [0.5, 0.5]]
)

# fp.partition.feature_shift
pixels = np.zeros((50, 3, 8, 8), np.uint8)
images = fp.Dataset({"pixel_values": pixels, "labels": np.zeros(50, int)}, ("one",))
clients = fp.partition.feature_shift(images, clients=5, kind="noise", strength=0.5)

# fp.partition.pooled
clients = fp.partition.pooled(data)

# fp.heterogeneity.histograms
table, names = fp.heterogeneity.histograms(
    fp.partition.iid(data, 5)
)  # [5, classes]

# fp.heterogeneity.js_divergence
distances = fp.heterogeneity.js_divergence(table)  # [5, 5]

# fp.heterogeneity.jeffreys
distances = fp.heterogeneity.jeffreys(table)

# fp.heterogeneity.mean_pairwise
print(fp.heterogeneity.mean_pairwise(distances))

# fp.heterogeneity.sorted_order
order = fp.heterogeneity.sorted_order(distances)  # alike clients stand together

# fp.tree.broadcast
stacked = fp.tree.broadcast(
    {"a": np.ones(3), "b": np.zeros(2)}, 4
)  # [4, 3] and [4, 2]

# fp.tree.take
first = fp.tree.take(stacked, 0)

# fp.tree.put
stacked = fp.tree.put(stacked, np.array([1]), fp.tree.take(stacked, np.array([0])))

# fp.tree.where
kept = fp.tree.where(np.array([True, False, True, True]), stacked, stacked)

# fp.tree.weighted_sum
mean = fp.tree.weighted_sum(stacked, np.full(4, 0.25))

# fp.tree.all_finite
finite = fp.tree.all_finite(stacked, axis=0)  # bool [4]

# fp.tree.distance
length = fp.tree.distance(first, mean)

# fp.tree.norm
length = fp.tree.norm(first)

# fp.tree.size
numbers = fp.tree.size(first)  # 5

# fp.tree.nbytes
sent = fp.tree.nbytes(first)

# fp.tree.leaf_name
names = [
    fp.tree.leaf_name(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(first)
]

# fp.tree.select
some = fp.tree.select(first, ["a"])

# fp.contracts.Roles
roles = fp.contracts.Roles(shared=("^adapter:",), private=("^head:",))

# fp.contracts.Platform
gpu = fp.contracts.Platform("gpu", capability=9.0)

# fp.contracts.on_platform
apply = fp.contracts.on_platform(plain.apply, gpu)
