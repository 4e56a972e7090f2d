"""The task of `scaling.py` on pfl-research and Flower, in PyTorch. It runs in their environment.

The model has the shape of ours: 2 layers of width 32, 4 heads, LoRA of rank 4 on query and value,
a pooler and a classifier; 2,212 numbers are trained, by SGD, on 2 steps of 4 examples for each
client. Random weights and data are drawn here, so that losses are similar and not equal.

    python experiments/benchmarks/peers.py --install DIR      # makes the environment
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

PACKAGES = (("torch==2.13.0",), ("pfl==0.6.0", "flwr[simulation]==1.41.0", "psutil"))
VOCABULARY, WIDTH, HEADS, LAYERS, CLASSES = 64, 32, 4, 2, 4


def install(directory):
    """Makes the environment, unless it is there."""
    python = Path(directory) / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    for packages in PACKAGES:  # torch first: the others would take another build of it
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)


def make_data(clients, task):
    """Returns tokens ``[clients, examples, length]`` and labels; each class prefers its tokens."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (clients, task["examples"])
    labels = rng.integers(0, CLASSES, shape)
    full = (*shape, task["length"])
    preferred = 8 + labels[..., None] * 8 + rng.integers(0, 8, full)
    tokens = np.where(rng.random(full) < 0.5, preferred, rng.integers(8, VOCABULARY, full))
    tokens[..., 0] = 1
    return tokens.astype(np.int64), labels.astype(np.int64)


def make_model(task):
    """Returns the PyTorch model, frozen apart from LoRA, the pooler and the classifier."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.a = nn.Parameter(torch.randn(WIDTH, task["rank"]) * WIDTH**-0.5)
            self.b = nn.Parameter(torch.zeros(task["rank"], WIDTH))

        def forward(self, x):
            return self.base(x) + 2.0 * (x @ self.a) @ self.b

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.value = Lora(), Lora()
            self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            split = [
                f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for f in (self.query, self.key, self.value)
            ]
            mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
            x = self.first(x + self.out(mixed))
            return self.second(x + self.down(functional.gelu(self.up(x))))

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.places = nn.Parameter(torch.randn(32, WIDTH) * 0.15)
            self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
            self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, tokens):
            x = self.layers(self.words(tokens) + self.places[: tokens.shape[1]])
            return self.head(torch.tanh(self.pooler(x[:, 0])))

        def loss(self, tokens, labels, eval=False):
            return functional.cross_entropy(self(tokens), labels)

        def metrics(self, tokens, labels, eval=True):
            from pfl.metrics import Weighted

            with torch.no_grad():
                return {
                    "loss": Weighted(self.loss(tokens, labels).item() * len(labels), len(labels))
                }

    torch.manual_seed(0)
    model = Classifier()
    for name, x in model.named_parameters():
        trained = name.endswith((".a", ".b")) or name.startswith(("pooler", "head"))
        x.requires_grad_(trained)
    return model


def trained(model):
    """Returns the trained parameters by name."""
    return {n: x for n, x in model.named_parameters() if x.requires_grad}


def run_pfl(clients, cohort, rounds, task):
    """Returns the seconds of every round, and the losses before each."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import get_default_device
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)  # noqa: NPY002  (pfl-research samples with it)
    tokens, labels = make_data(clients, task)
    device = get_default_device()  # a GPU if there is one
    tokens, labels = torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)
    module = make_model(task).to(device)

    def client(user):
        return Dataset((tokens[user], labels[user]), user_id=str(user))

    federation = FederatedDataset(client, get_user_sampler("random", list(range(clients))))
    sgd = torch.optim.SGD(trained(module).values(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, sgd)
    marks, losses = [time.perf_counter()], []
    probe = (tokens[: min(clients, 64)].flatten(0, 1), labels[: min(clients, 64)].flatten())

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, *, central_iteration):
            if device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
            with torch.no_grad():
                losses.append(module.loss(*probe).item())
            marks[-1] = (marks[-1], time.perf_counter())
            return False, Metrics()

    backend = SimulatedBackend(federation, None)
    algorithm = FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task["steps"],
            local_learning_rate=task["rate"],
            local_batch_size=task["batch"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )
    begun = [marks[0], *(end for _, end in marks[1:])]
    return [end - start for start, (end, _) in zip(begun, marks[1:], strict=False)], losses


def run_flower(clients, cohort, rounds, task):
    """Returns the seconds of every round, and the losses after each."""
    import numpy as np
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    tokens, labels = (torch.from_numpy(x) for x in make_data(clients, task))
    app, server = ClientApp(), ServerApp()
    marks, losses = [], []

    @app.train()
    def train(message, context):
        user = int(context.node_config["partition-id"])
        module = make_model(task)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        optimizer = torch.optim.SGD(trained(module).values(), lr=task["rate"])
        for _ in range(task["steps"]):
            optimizer.zero_grad()
            module.loss(tokens[user], labels[user]).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord({n: x.detach() for n, x in trained(module).items()}),
            "metrics": MetricRecord({"num-examples": len(labels[user])}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid, context):
        module = make_model(task)

        def measure(number, arrays):
            marks.append(time.perf_counter())
            module.load_state_dict(arrays.to_torch_state_dict(), strict=False)
            with torch.no_grad():
                losses.append(module.loss(tokens[:64].flatten(0, 1), labels[:64].flatten()).item())
            return MetricRecord({"loss": losses[-1]})

        FedAvg(
            fraction_train=cohort / clients,
            min_train_nodes=min(2, cohort),
            fraction_evaluate=0.0,
            min_available_nodes=clients,
        ).start(
            grid=grid,
            initial_arrays=ArrayRecord({n: x.detach() for n, x in trained(module).items()}),
            num_rounds=rounds + 1,
            evaluate_fn=measure,
        )

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=clients, backend_config=resources)
    return np.diff(marks).tolist(), losses


def peak_memory(stop, found):
    """Notes the largest proportional memory of this process and its children, in MB."""
    import psutil

    while not stop.wait(0.3):
        total = 0
        own = psutil.Process()
        for process in [own, *own.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        found[0] = max(found[0], total / 2**20)


def main():
    """Installs the libraries, or measures one point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", metavar="DIR")
    parser.add_argument("--point", help="JSON")
    args = parser.parse_args()
    if args.install:
        install(args.install)
        return
    import numpy as np
    import torch

    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    point = json.loads(args.point)
    task = {n: point[n] for n in ("examples", "batch", "steps", "length", "rank", "rate")}
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for each other
    stop, peak = threading.Event(), [0.0]
    watch = threading.Thread(target=peak_memory, args=(stop, peak), daemon=True)
    watch.start()
    began = time.perf_counter()
    runs = {"pfl": run_pfl, "flower": run_flower}
    seconds, losses = runs[point["system"]](
        point["clients"], point["cohort"], point["rounds"], task
    )
    stop.set()
    watch.join()
    print(
        json.dumps(
            {
                "prepare_seconds": time.perf_counter() - began - sum(seconds),
                "compile_seconds": 0.0,
                "first_round_seconds": seconds[0],
                "round_seconds": float(np.median(seconds[1:])),
                "rounds": seconds[1:],
                "peak_mb": peak[0],
                "losses": losses,
                "trained_numbers": sum(x.numel() for x in trained(make_model(task)).values()),
            }
        )
    )


if __name__ == "__main__":
    main()
