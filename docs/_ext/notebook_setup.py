# Says where this runs and on which device. Installs fedjax_peft if it is missing.
import importlib.util
import subprocess
import sys
from glob import glob
from pathlib import Path

extra = ""
if glob("/dev/nvidia[0-9]*"):
    extra = "[cuda]"
elif glob("/dev/accel*") or glob("/dev/vfio/[0-9]*"):
    extra = "[tpu]"
near = ("..", ".", "fedjax_peft")
folders = [path for path in near if Path(path, "fedjax_peft/__init__.py").exists()]
wheels = sorted(glob("fedjax_peft-*.whl"))
if folders:
    origin, wanted = "the checkout", ["-e", folders[0] + extra]
elif wheels:
    origin, wanted = wheels[-1], [wheels[-1] + extra]
else:
    origin, wanted = "nowhere", []

place = "Colab" if Path("/content").exists() else "Here"
place = "Kaggle" if Path("/kaggle").exists() else place
machine = {"": "a CPU", "[cuda]": "an NVIDIA GPU", "[tpu]": "a TPU"}[extra]
if importlib.util.find_spec("fedjax_peft"):
    print(f"{place}: {machine}; fedjax_peft is installed.")
elif not wanted:
    raise SystemExit(
        "Upload fedjax_peft-....whl beside this notebook (`make dist` writes it"
        " into dist/), or put a checkout into the folder fedjax_peft. Then run this"
        " cell again."
    )
else:
    print(f"{place}: {machine}; installing fedjax_peft{extra} from {origin}.")
    pip, here = [sys.executable, "-m", "pip", "install", "-q"], []
    if not importlib.util.find_spec("pip"):  # an environment of uv
        pip, here = ["uv", "pip", "install", "-q"], ["--python", sys.executable]
    subprocess.run([*pip, *here, *wanted], check=True)
    sys.path[:0] = folders  # pip's link to a checkout is read at the next start
