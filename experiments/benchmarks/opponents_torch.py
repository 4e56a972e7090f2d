"""The rows of ``opponents.py`` in PyTorch. It runs in the environment of the row's library.

All rows do one thing: FedAvg of LoRA on query and value and of the head, by AdamW, in rounds in
which all clients take part. Each client takes its local steps on one batch, so the order of
examples does not matter and losses can be compared. Weights, the start of the adapters and the
examples come from one folder (:func:`make`).
"""

import argparse
import functools
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

RATE, DECAY = 1e-3, 1e-4
"""Of AdamW."""


class Turns:
    """Says what each round took, and waits for the parent before the next one begins."""

    def __init__(self):
        self.began = self._clocks()

    def _clocks(self):
        return time.perf_counter(), processor_seconds()

    def end(self, loss):
        """Prints the figures of the round that has ended; returns when the next one may begin."""
        wall, cpu = (now - then for now, then in zip(self._clocks(), self.began, strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"wall": wall, "cpu": cpu, "loss": float(loss), "peak": peak}), flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # the parent has what it wants, and the library would go on
        self.began = self._clocks()


def processor_seconds():
    """Returns the processor's seconds of this process, and of its children where they are known."""
    total = time.process_time()
    try:
        import psutil
    except ImportError:
        return total
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


def make(folder, shape):
    """Writes the model, the start of the adapters, and the examples of the clients."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model(**shape["config"], num_labels=shape["classes"], **off)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "model")
    start = {
        name.split("base_model.model.")[1].removesuffix(
            ".lora_A.default.weight"
        ): x.detach().numpy()
        for name, x in adapted(folder, shape)[0].named_parameters()
        if "lora_A" in name
    }
    np.savez(folder / "adapter.npz", **start)
    rng = np.random.default_rng(0)
    each = (shape["clients"], shape["batch"])
    vocabulary = shape["config"]["vocab_size"]
    ids = rng.integers(5, vocabulary, (*each, shape["length"]), dtype=np.int32)
    labels = rng.integers(0, shape["classes"], each, dtype=np.int32)
    np.savez(folder / "examples.npz", input_ids=ids, labels=labels)


def adapted(folder, shape, attention="sdpa"):
    """Returns the model with LoRA, and its trained parameters by name."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", attn_implementation=attention
    )
    heads = ["classifier"] + (["bert.pooler"] if hasattr(model, "bert") else [])
    adapter = LoraConfig(
        r=shape["rank"],
        lora_alpha=shape["rank"],
        target_modules=["query", "value"],
        task_type="SEQ_CLS",
        modules_to_save=heads,
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a warning of peft about transformers
        model = get_peft_model(model, adapter).train().to(device())
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    if (folder / "adapter.npz").exists():
        with torch.no_grad():
            for place, a in np.load(folder / "adapter.npz").items():
                name = f"base_model.model.{place}.lora_A.default.weight"
                trained[name].copy_(torch.from_numpy(a))
    return model, trained


def device():
    """Returns the GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def examples(folder):
    """Returns tokens ``[clients, batch, length]`` and labels ``[clients, batch]``."""
    import numpy as np
    import torch

    stored = np.load(folder / "examples.npz")
    return [torch.from_numpy(stored[n]).long().to(device()) for n in ("input_ids", "labels")]


def loss_of(model, ids, labels, shape, parameters=None):
    """Returns the mean loss of a batch."""
    import torch

    given = {"input_ids": ids}  # no padding; a mask would be read by Python, which vmap refuses
    half = shape["dtype"] == "bfloat16"
    with torch.autocast(device().type, torch.bfloat16, enabled=half):
        if parameters is None:
            logits = model(**given).logits
        else:
            logits = torch.func.functional_call(model, parameters, kwargs=given).logits
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def adamw(parameters, lr=RATE):
    """Returns the optimizer of a client."""
    import torch

    return torch.optim.AdamW(parameters, lr=lr, weight_decay=DECAY)


def one_by_one(folder, shape):
    """Returns a function that runs a round, one client after another, and returns its loss."""
    import torch

    model, trained = adapted(folder, shape)
    ids, labels = examples(folder)
    server = [x.detach().clone() for x in trained.values()]

    def step():
        nonlocal server
        sums, losses = [torch.zeros_like(x) for x in server], []
        for client in range(len(ids)):
            with torch.no_grad():
                for x, start in zip(trained.values(), server, strict=True):
                    x.copy_(start)
            losses += local_steps(model, trained, ids[client], labels[client], shape)
            with torch.no_grad():
                for total, x in zip(sums, trained.values(), strict=True):
                    total += x / len(ids)
        server = sums
        return torch.stack(losses).mean().item()

    return step


def local_steps(model, trained, ids, labels, shape):
    """Trains a client, and returns the losses of its steps."""
    optimizer, losses = adamw(trained.values()), []
    for _ in range(shape["steps"]):
        loss = loss_of(model, ids, labels, shape)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def stacked(folder, shape, compiled=False):
    """Returns the same for all clients at once: ``torch.func.vmap`` over stacked parameters."""
    import torch

    # vmap has no rule for the fused attention, and would run it client by client.
    model, trained = adapted(folder, shape, attention="eager")
    ids, labels = examples(folder)
    server = {name: x.detach().clone() for name, x in trained.items()}

    def loss(parameters, ids, labels):
        return loss_of(model, ids, labels, shape, parameters)

    gradient = torch.func.vmap(torch.func.grad_and_value(loss))
    gradient = torch.compile(gradient, dynamic=False) if compiled else gradient

    def step():
        nonlocal server
        copies = {n: x.expand(len(ids), *x.shape).clone() for n, x in server.items()}
        optimizer, losses = adamw([x.requires_grad_() for x in copies.values()]), []
        for _ in range(shape["steps"]):
            grads, values = gradient({n: x.detach() for n, x in copies.items()}, ids, labels)
            for name, x in copies.items():
                x.grad = grads[name]
            optimizer.step()
            losses.append(values.detach())
        server = {name: x.detach().mean(0) for name, x in copies.items()}
        return torch.stack(losses).mean().item()

    return step


@functools.cache
def kept(folder, text):
    """Returns model, trained parameters and examples: an actor of Flower makes them once."""
    import torch

    shape = json.loads(text)
    if device().type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // shape["actors"]))
    return (*adapted(Path(folder), shape), *examples(Path(folder)))


def run_flower(folder, shape, turns):
    """Runs Flower's simulation, whose actors train clients side by side."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    here, text, clients = str(Path(__file__).parent), json.dumps(shape), shape["clients"]
    app, server = ClientApp(), ServerApp()

    @app.train()
    def train(message, context):
        import sys

        import torch

        sys.path.insert(0, here)
        from opponents_torch import kept, local_steps

        model, trained, ids, labels = kept(str(folder), text)
        sent = message.content["arrays"].to_torch_state_dict()
        with torch.no_grad():
            for name, x in trained.items():
                x.copy_(sent[name])
        user = int(context.node_config["partition-id"])
        losses = local_steps(model, trained, ids[user], labels[user], shape)
        numbers = {"num-examples": shape["batch"], "loss": torch.stack(losses).mean().item()}
        arrays = ArrayRecord({n: x.detach().cpu() for n, x in trained.items()})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(numbers)})
        return Message(content=content, reply_to=message)

    class Strategy(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            turns.end(metrics["loss"])
            return arrays, metrics

    @server.main()
    def main(grid, context):
        _, trained = adapted(folder, shape)
        start = ArrayRecord({n: x.detach().cpu() for n, x in trained.items()})
        strategy = Strategy(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
        strategy.start(grid=grid, initial_arrays=start, num_rounds=10**6)

    share = 1 / shape["actors"] if device().type == "cuda" else 0.0
    cores = max(1, (os.cpu_count() or 1) // shape["actors"])
    resources = {"client_resources": {"num_cpus": cores, "num_gpus": share}}
    run_simulation(server, app, num_supernodes=clients, backend_config=resources)


def run_pfl(folder, shape, turns):
    """Runs pfl-research's simulation, one client after another."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    module, trained = adapted(folder, shape)
    ids, labels = examples(folder)
    losses = []

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def loss(self, ids, labels, eval=False):
            found = loss_of(self.inner, ids, labels, shape)
            losses.append(found.detach())
            return found

        def metrics(self, ids, labels, eval=True):
            return {}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, *, central_iteration):
            turns.end(torch.stack(losses).mean())
            losses.clear()
            return False, Metrics()

    def client(user):
        return Dataset((ids[user], labels[user]), user_id=str(user))

    users = list(range(len(ids)))
    federation = FederatedDataset(client, get_user_sampler("minimize_reuse", users))
    model = PyTorchModel(Classifier(), adamw, torch.optim.SGD(trained.values(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**9,
            train_cohort_size=len(ids),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(federation, None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=shape["steps"],
            local_learning_rate=RATE,
            local_batch_size=shape["batch"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )


def main():
    """Makes the folder, or runs a row until the parent closes its pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row")
    parser.add_argument("folder", type=Path)
    a = parser.parse_args()
    shape = json.loads((a.folder / "shape.json").read_text())
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    if a.row == "make":
        make(a.folder, shape)
        return
    turns, loops = Turns(), {"flower": run_flower, "pfl": run_pfl}
    if a.row in loops:
        loops[a.row](a.folder, shape, turns)
        return
    rows = {
        "one by one": one_by_one,
        "vmap": stacked,
        "vmap compiled": functools.partial(stacked, compiled=True),
    }
    step = rows[a.row](a.folder, shape)
    while True:
        turns.end(step())


if __name__ == "__main__":
    main()
