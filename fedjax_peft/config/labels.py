"""What a result is called says what ran: checks of the names of methods and points, and notices."""

from collections.abc import Iterator, Mapping, Sequence

from fedjax_peft import algorithms
from fedjax_peft.config.keys import Config
from fedjax_peft.config.parts import fingerprint
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError

_NAMES = ("name", "preset", "preset_changes", "runtime", "validation")
"""Keys of a config that are names, or that follow from the other keys."""
_OWN_TESTS = ("client_test", "client_holdout", "client_validation", "client_validation_holdout")
_MOST = 6


def check_apart(
    runs: Mapping[str, Config], overrides: Sequence[str] = (), methods: Sequence[str] = ()
) -> None:
    """Raises InputError for runs that would compute the same, or methods of one name.

    Args:
      runs: name -> resolved config, of methods or of the points of a sweep.
      overrides: of the command line, for the message.
      methods: the method of each run; by default its name.
    """
    because = f" after {' '.join(overrides)}" if overrides else ""
    same: dict[str, list[str]] = {}
    called: dict[str, dict[str, None]] = {}
    for (name, config), method in zip(runs.items(), methods or runs, strict=True):
        settings = {key: value for key, value in config.items() if key not in _NAMES}
        same.setdefault(fingerprint(settings), []).append(name)
        called.setdefault(config["name"] or method, {})[method] = None
    for names in filter(lambda names: len(names) > 1, same.values()):
        raise InputError(
            f"{_listed(names)} would be the same run under {len(names)} names: nothing tells their"
            f" settings apart{because}. Change a setting of one method only with"
            " methods.NAME.key=value, run one method with --only NAME, or leave the others out."
        )
    for title, own in called.items():
        if len(own) > 1:
            raise InputError(
                f"{_listed([*own])} would all be called {show(title)} in tables and plots{because}:"
                " give each its own name, or leave name out."
            )


def notices(method: str, config: Config) -> Iterator[str]:
    """Yields what to say of a method before it runs, such as that its name is misleading."""
    runs = config["algorithm"]["name"]
    if method != runs and method in algorithms.__all__:
        yield f"the method {method!r} has the name of an algorithm, and runs {runs!r}"
    asked = config["evaluation"]
    if "clients" in asked["diagnostics"] and not any(asked[name] for name in _OWN_TESTS):
        natural = config["partition"]["name"] == "natural"
        own = "evaluation.client_test = true, which takes each client's part of the test split, or "
        yield (
            'evaluation.diagnostics = ["clients"] records the training of each client, and no'
            f" scores: the clients have no tests of their own. Set {own if natural else ''}"
            "evaluation.client_holdout = 0.2, which holds out a fifth of each client's training"
            " examples as its test"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(show, names[:_MOST]))
    return f"{shown} and {len(names) - _MOST} more" if len(names) > _MOST else shown
