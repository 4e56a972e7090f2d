# Where this runs, and which accelerator it sees. Installs fedjax_peft if it is missing.
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
folders = [
    path for path in ("..", ".", "fedjax_peft") if Path(path, "fedjax_peft/__init__.py").exists()
]
wheels = sorted(glob("fedjax_peft-*.whl"))
if folders:
    origin, wanted = "the checkout", ["-e", folders[0] + extra]
elif wheels:
    origin, wanted = wheels[-1], [wheels[-1] + extra]
else:
    origin, wanted = "the package index", ["fedjax_peft" + extra]

place = "Kaggle" if Path("/kaggle").exists() else "Colab" if Path("/content").exists() else "Here"
machine = {"": "a CPU", "[cuda]": "an NVIDIA GPU", "[tpu]": "a TPU"}[extra]
if importlib.util.find_spec("fedjax_peft"):
    print(f"{place}: {machine}; fedjax_peft is installed.")
else:
    print(f"{place}: {machine}; installing fedjax_peft{extra} from {origin}.")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
    sys.path[:0] = folders  # pip's link to a checkout is read at the next start
