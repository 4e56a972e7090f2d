"""A short example of each public name, by module; a test runs the file as a script.

The reference shows the lines below ``# fp.NAME`` with the name, up to the next.
The objects here at the top are those of all examples.
"""

from functools import partial

import jax
import jax.numpy as jnp
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


# fp.Model
def logistic(frozen, trainable, batch, key, train):
    return fp.contracts.Outputs(batch["x"] @ trainable["head.kernel"])


zeros, kinds = {"head.kernel": jnp.zeros((3, 3))}, {"head.kernel": "head"}
own = fp.Model(logistic, frozen={}, trainable=zeros, kinds=kinds, graph=None)

# fp.State
fedavg, three = fp.algorithms.fedavg(optax.sgd(0.1)), fp.partition.iid(alone, 3)
session = fp.session(own, fedavg, three, local_steps=1)
state = session.init(seed=0)  # an fp.State
print(state.round_index, fp.tree.size(state.server))

# fp.RoundInfo
state, info = session.step(state)  # info is an fp.RoundInfo
print(info.plan.client, info.norms)

# fp.Run
run = fp.simulate(own, fedavg, three, rounds=1, local_steps=1)
print(run.metrics[-1]["bytes_up"], run.params)


# fp.Sweep
def best_rate(found: fp.Sweep) -> float:
    return found.best("validation_accuracy").settings["learning_rate"]


# fp.Tuned
def best_values(found: fp.Tuned) -> dict:
    return found.study.best_params


# fp.algorithms.afl
algorithm = fp.algorithms.afl(optimizer, clients=10, mixture_rate=0.1)

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

# fp.algorithms.fedask
algorithm = fp.algorithms.fedask(optimizer, train="B")

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

# fp.algorithms.fedlease
algorithm = fp.algorithms.fedlease(
    optimizer, clients=10, warmup_rounds=2, max_experts=4
)  # over fp.peft.lora_experts(experts=4)

# fp.algorithms.fedmatch
algorithm = fp.algorithms.fedmatch(optimizer)  # over fp.peft.dual()

# fp.algorithms.fedkseed
algorithm = fp.algorithms.fedkseed(optax.sgd(1e-4), seeds=4096)

# fp.algorithms.fedmcp
algorithm = fp.algorithms.fedmcp(optimizer)  # over fp.peft.dual()

# fp.algorithms.fedmezo
algorithm = fp.algorithms.fedmezo(optax.sgd(1e-4))

# fp.algorithms.fedmomentum
algorithm = fp.algorithms.fedmomentum(optimizer)

# fp.algorithms.fednova
algorithm = fp.algorithms.fednova(optax.sgd(0.1))

# fp.algorithms.fedper
algorithm = fp.algorithms.fedper(optimizer)

# fp.algorithms.fedplora
algorithm = fp.algorithms.fedplora(optimizer, ranks=[1, 2, 4])

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

# fp.algorithms.fslora
algorithm = fp.algorithms.fslora(optimizer, ranks=[1, 2, 4])

# fp.algorithms.gossip
algorithm = fp.algorithms.gossip(optimizer, clients=10, graph="ring")

# fp.algorithms.hetlora
algorithm = fp.algorithms.hetlora(optimizer, prune=0.99)

# fp.algorithms.hierfavg
algorithm = fp.algorithms.hierfavg(
    optimizer, edges=3, period=2
)  # client k: edge k % 3

# fp.algorithms.hilora
algorithm = fp.algorithms.hilora(
    optimizer, clients=10, root_rounds=4, cluster_rounds=4
)  # over fp.peft.lora_sum()

# fp.algorithms.ifca
algorithm = fp.algorithms.ifca(optimizer, clusters=3)

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

# fp.algorithms.q_fedavg
algorithm = fp.algorithms.q_fedavg(optax.sgd(0.1), q=1.0, lipschitz=10.0)

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

# fp.aggregators.raflora
algorithm = fp.algorithms.fedavg(optimizer, aggregator=fp.aggregators.raflora())

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

# fp.peft.hira
model = fp.attach(plain, fp.peft.hira(rank=4))

# fp.peft.houlsby
model = fp.attach(plain, fp.peft.houlsby())

# fp.peft.ia3
model = fp.attach(plain, fp.peft.ia3())

# fp.peft.layer_norm
model = fp.attach(plain, fp.peft.layer_norm())

# fp.peft.lora
model = fp.attach(plain, fp.peft.lora())

# fp.peft.lora_experts
model = fp.attach(plain, fp.peft.lora_experts(experts=4))

# fp.peft.lora_sb
model = fp.attach(plain, fp.peft.lora_sb(rank=4))

# fp.peft.lora_sum
model = fp.attach(plain, fp.peft.lora_sum())

# fp.peft.lora_with_base
model = fp.attach(plain, fp.peft.lora_with_base())

# fp.peft.lora_xs
model = fp.attach(plain, fp.peft.lora_xs(rank=4))

# fp.peft.miss
model = fp.attach(plain, fp.peft.miss(rank=4))

# fp.peft.mixed_lora
model = fp.attach(plain, fp.peft.mixed_lora())

# fp.peft.oft
model = fp.attach(plain, fp.peft.oft(block_size=8))

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

# fp.peft.shira
model = fp.attach(plain, fp.peft.shira(rank=4))

# fp.peft.slora
model = fp.attach(plain, fp.peft.slora())

# fp.peft.vera
model = fp.attach(plain, fp.peft.vera(rank=16))

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

# fp.call_of
call = fp.call_of(fp.algorithms.fedprox(fp.optimizers.adamw(1e-3), mu=0.1))
print(
    call
)  # fp.algorithms.fedprox(fp.optimizers.adamw(learning_rate=0.001), mu=0.1)
again = call.build({"mu": 0.2})  # the same with another mu

# fp.optimizers.adam
optimizer = fp.optimizers.adam(1e-3, clip_norm=1.0)

# fp.optimizers.sgd
optimizer = fp.optimizers.sgd(0.1, momentum=0.9)

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

# fp.tasks.preference
task = fp.tasks.preference(loss="dpo", beta=0.1)

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

# fp.heads.Head
head = fp.heads.Head("classification", ("no", "yes"), fresh=True)

# fp.heads.KINDS
heads = [fp.heads.make(kind, 4) for kind in fp.heads.KINDS]

# fp.heads.WITHOUT_CLASSES
head = fp.heads.WITHOUT_CLASSES["causal_lm"]()

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

# fp.partition.zipf
clients = fp.partition.zipf(data, clients=10, exponent=1.2)

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

# fp.tree.row
last = fp.tree.row(stacked, jnp.int32(3))

# fp.tree.add
doubled = fp.tree.add(stacked, np.array([1]), fp.tree.take(stacked, np.array([1])))

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

# fp.tree.shapes
planned = fp.tree.shapes(first)  # jax.ShapeDtypeStruct in the place of arrays

# fp.tree.nbytes
sent = fp.tree.nbytes(first)

# fp.tree.leaf_name
names = [
    fp.tree.leaf_name(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(first)
]

# fp.tree.select
some = fp.tree.select(first, ["a"])

# fp.testing.TINY_LLAMA
decoder = fp.random_model(fp.testing.TINY_LLAMA, head=fp.heads.causal_lm())

# fp.testing.write_tiny_checkpoint
folder = fp.testing.write_tiny_checkpoint("another-tiny-bert")

# fp.testing.write_tiny_texts
folder = fp.testing.write_tiny_texts("texts", train=20, test=10)


# fp.devices.DevicePlan
def report(plan: fp.devices.DevicePlan) -> None:
    print(plan.fits, plan.most_lanes, plan.seconds)


# fp.differentiable.Rounds
rounds = fp.differentiable.rounds(session, 2)  # an fp.differentiable.Rounds
print(rounds.weights.shape)  # [rounds, slots]

# fp.differentiable.Plans
plans = rounds.plans(after=2)  # those of rounds 3 and 4
print(plans.round_index, plans.plan.client)

# fp.distributed.processes
print(fp.distributed.processes())  # 1 without fp.distributed.initialize

# fp.distributed.process
print(fp.distributed.process())  # 0, the first one

# fp.distributed.is_writer
if fp.distributed.is_writer():
    print("Only one process prints this.")

# fp.distributed.agree
started = fp.distributed.agree("12:30")  # process 0's value, in all processes

# fp.distributed.whole
server = fp.distributed.whole(state.server)

# fp.contracts.Key
key: fp.contracts.Key = jax.random.key(0)

# fp.contracts.Params
params: fp.contracts.Params = {
    "query.lora_a": jnp.ones((8, 2)),
    "query.lora_b": jnp.ones((2, 4)),
}

# fp.contracts.PyTree
nested: fp.contracts.PyTree = {"leaves": params, "examples": jnp.float32(12)}

# fp.contracts.Batch
batch: fp.contracts.Batch = {
    "x": jnp.eye(3),
    "labels": jnp.arange(3),
    "mask": jnp.array([True, True, False]),  # the last one fills the batch up
}

# fp.contracts.Splits
splits: fp.contracts.Splits = ((r".*query\.kernel", 1), (r".*output\.kernel", 0))

# fp.contracts.Outputs
outputs: fp.contracts.Outputs = own.apply({}, zeros, batch, None, False)
print(outputs.logits.shape)  # [batch, classes]


# fp.contracts.ApplyFn
def two_layers(frozen, trainable, batch, key, train):
    hidden = jnp.tanh(batch["x"] @ frozen["encoder.kernel"])
    return fp.contracts.Outputs(hidden @ trainable["head.kernel"])


# fp.contracts.Sampling
sampling = fp.contracts.Sampling(max_new_tokens=32, temperature=0.7, top_p=0.9)

# fp.contracts.Task
task: fp.contracts.Task = fp.tasks.classification()
print(task.headline, task.lower_is_better)

# fp.contracts.loss_and_metrics
(total, count), metrics = fp.contracts.loss_and_metrics(task, outputs, batch)

# fp.contracts.Metrics
sums: fp.contracts.Metrics = metrics
print({name: float(total / count) for name, (total, count) in sums.items()})

# fp.contracts.ClientContext
context = fp.contracts.ClientContext(
    partial(own.apply, own.frozen), task, fixed={}, round_index=jnp.int32(1)
)
loss, metrics = context.objective(zeros, batch, key)


# fp.contracts.LossFn
def half(params, batch, key):  # of the task's loss
    loss, metrics = context.objective(params, batch, key)
    return loss / 2, metrics


# fp.contracts.mean_gradient
gradient, metrics = fp.contracts.mean_gradient(half, zeros, batch, key)


# fp.contracts.Gradient
def clipped(loss, params, batch, key):
    gradient, metrics = fp.contracts.mean_gradient(loss, params, batch, key)
    factor = 1 / jnp.maximum(1, fp.tree.norm(gradient))
    return jax.tree.map(lambda x: x * factor, gradient), metrics


careful = context._replace(gradient=clipped)

# fp.contracts.Tuning
tuning = fp.contracts.Tuning(fp.algorithms.local(optimizer).client, epochs=1)


# fp.contracts.Probe
def confidence(context, params, batch):
    logits = context.apply(params, batch, None, False).logits
    best = jax.nn.softmax(logits).max(-1) * batch["mask"]
    return {"confidence": (best.sum(), batch["mask"].sum())}


print(confidence(context, zeros, batch))

# fp.contracts.Optimizer
warm: fp.contracts.Optimizer = optax.adamw(optax.linear_schedule(0, 1e-3, 10))


# fp.contracts.RateSchedule
def halving(round_index):
    return 0.5 ** (round_index // 10)


# fp.contracts.Diagnosis
def largest_change(before, after, fixed):
    change = [jnp.abs(after[name] - before[name]).max() for name in after]
    return {"largest_change": jnp.stack(change).max()}


# fp.contracts.Product
product = fp.contracts.Product(params["query.lora_a"], params["query.lora_b"])

# fp.contracts.Factors
factors = fp.contracts.Factors(params["query.lora_a"], params["query.lora_b"])

# fp.contracts.Weighted
weighted = fp.contracts.Weighted(jnp.float32(12), {"centre": jnp.ones(8)})

# fp.contracts.Stacked
stack = fp.contracts.Stacked(params)  # the server sees all uploads: a median

# fp.contracts.Segmented
cluster = jnp.array([0.0, 1.0, 0.0])  # of three, the second
segment = fp.contracts.Segmented(cluster, params)

# fp.contracts.Integers
integers = fp.contracts.Integers(jnp.array([3, -7], jnp.int32))


# fp.contracts.Lift
def lift(upload, template, fixed):
    return jax.tree.map(jnp.subtract, upload, template)


# fp.contracts.Total
total = fp.contracts.Total(
    lift(params, params, {}), weight=jnp.float32(1), weights=jnp.ones(1)
)


# fp.contracts.Finish
def finish(total, template, context, state):
    weight = jnp.where(total.weight > 0, total.weight, 1)
    update = jax.tree.map(lambda x, y: x + y / weight, template, total.value)
    return fp.contracts.Aggregated(update, metrics={})


# fp.contracts.Aggregated
aggregated: fp.contracts.Aggregated = finish(total, params, None, ())
print(aggregated.update.keys(), aggregated.metrics)

# fp.contracts.Aggregator
mean_change = fp.contracts.Aggregator("mean_change", lift, finish, linear=True)


# fp.contracts.Refactor
def refactor(products, template, scales):
    u, s, v = jnp.linalg.svd(products["query"])
    found = {"query.lora_a": u[:, :2] * s[:2], "query.lora_b": v[:2]}
    return fp.contracts.Aggregated(found, metrics={})


# fp.contracts.RoundContext
def update(state, aggregated, context: fp.contracts.RoundContext):
    enough = context.participants >= 3
    return jax.tree.map(lambda x, y: jnp.where(enough, y, x), state, aggregated)


# fp.contracts.ServerUpdate
server = fp.contracts.ServerUpdate(
    init=lambda shared: shared, update=update, broadcast=lambda state: state
)

# fp.contracts.Weights
weights: fp.contracts.Weights = "uniform"

# fp.contracts.Algorithm
patient = fp.contracts.Algorithm(
    "patient", fedavg.roles, fedavg.client, mean_change, server, weights=weights
)

# fp.contracts.Traffic
traffic = fp.contracts.Traffic(
    sent_leaves=lambda broadcast, index: {"query.lora_a": index % 2 == 1}
)
patient = patient._replace(traffic=traffic)  # A rests in every second round

# fp.contracts.Feature
reason = "Its clients compare what they receive."
patient = patient._replace(incompatible={fp.contracts.Feature.DOWNLINK: reason})

# fp.contracts.refusals
print({one.value: why for one, why in fp.contracts.refusals(patient).items()})

# fp.contracts.check_compatible
used = {fp.contracts.Feature.TRANSFORMS: "the upload transform 'sign'"}
fp.contracts.check_compatible(patient, used)  # raises InputError if it is refused

# fp.contracts.Source
source = fp.contracts.Source(params, template=params, round_index=jnp.int32(1))

# fp.contracts.Participant
client = fp.contracts.Participant(jnp.int32(0), source, rank_mask={}, key=key)

# fp.contracts.Upload
upload = fp.contracts.Upload(
    params, jnp.float32(12), client, template=params, client_state={}
)


# fp.contracts.Stage
def reversed_change(upload):
    flipped = jax.tree.map(lambda x, y: 2 * y - x, upload.value, upload.template)
    return upload._replace(value=flipped)


# fp.contracts.Stages
stages = fp.contracts.Stages(sent=(reversed_change,))
upload = stages.sent[0](upload)

# fp.contracts.Wrapped
wrapped = fp.contracts.Wrapped(patient, stages)

# fp.contracts.Attack
attack = fp.contracts.Attack(
    "reversed",
    apply=lambda algorithm, facts: fp.contracts.Wrapped(algorithm, stages),
    hostile=lambda clients: tuple(range(clients)),  # all of them
)

# fp.contracts.Federation
facts = fp.contracts.Federation(
    clients=100,
    per_round=10,
    sampling="poisson",
    batch_size=16,
    batch_sampling="shuffled",
    most_steps=4,
    most_passes=1,
    fewest_examples=20,
)

# fp.contracts.Privacy
mechanism: fp.contracts.Privacy = fp.privacy.laplace(clip=0.5, noise_multiplier=1.0)
print(mechanism.statement(facts))

# fp.contracts.Guarantee
guarantee: fp.contracts.Guarantee = mechanism.guarantee(facts, 20)
print(guarantee.epsilon, guarantee.delta)

# fp.contracts.Job
job = fp.contracts.Job(
    client=3,
    number=0,
    round_index=1,
    version=0,
    place=0,
    steps=4,
    first=True,
    start=0.0,
    finish=12.5,
)

# fp.contracts.Aggregation
aggregation = fp.contracts.Aggregation(time=12.5, version=0, place=0, jobs=(job,))


# fp.contracts.Timeline
def timeline(round_index):  # the same client, again and again
    return aggregation._replace(time=12.5 * round_index, version=round_index - 1)


# fp.contracts.Asynchronous
server = fp.contracts.Asynchronous(
    "every minute",
    apply=lambda algorithm, facts: fp.contracts.Wrapped(algorithm),
    period=60.0,
)

# fp.contracts.Availability
always = fp.contracts.Availability(
    "always",
    at=lambda seed, clients, now: (
        np.ones(len(clients), bool),
        np.full(len(clients), np.inf),
    ),
)


# fp.contracts.TransformClient
def rounded(update, memory, received, key):
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), update)
    return fp.contracts.Encoded(coarse, measured={"norm": fp.tree.norm(update)})


# fp.contracts.Encoded
encoded: fp.contracts.Encoded = rounded(params, (), (), key)
print(encoded.update.keys(), encoded.measured)


# fp.contracts.TransformServer
def report_norm(aggregate, state, measured, context):
    norms = jnp.where(measured.accepted, measured.values["norm"], 0)
    return fp.contracts.Decoded(aggregate, state, {"largest_norm": norms.max()})


# fp.contracts.Measurements
measured = fp.contracts.Measurements(
    {"norm": jnp.ones(3)}, accepted=jnp.ones(3, bool)
)

# fp.contracts.Decoded
decoded: fp.contracts.Decoded = report_norm({}, (), measured, None)
print(decoded.metrics)

# fp.contracts.Wire
print(fp.contracts.Wire(entries=1000, bits=4, extra=32).nbytes)  # 504


# fp.contracts.TransformWire
def half_as_wide(template, wires):
    return {name: wire._replace(bits=16) for name, wire in wires.items()}


# fp.contracts.Transform
transform = fp.contracts.Transform(
    "bfloat16", rounded, server=report_norm, wire=half_as_wide
)

# fp.contracts.Roles
roles = fp.contracts.Roles(shared=("^adapter:",), private=("^head:",))

# fp.contracts.Platform
gpu = fp.contracts.Platform("gpu", capability=9.0)

# fp.contracts.on_platform
apply = fp.contracts.on_platform(plain.apply, gpu)

# fp.executors.ray
try:
    import ray  # noqa: F401

    executor = fp.executors.ray(num_cpus=1)  # for fp.sweep, after ray.init()
except ModuleNotFoundError:
    pass  # the extra ray is not installed
