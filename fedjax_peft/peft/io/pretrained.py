"""Adapters from elsewhere, in the format of Hugging Face PEFT or AdapterHub, as PEFT methods.

The names of the tensors tell which modules are adapted, so every way of choosing targets is
understood. A config field that changes the maths and is not implemented is refused by name. Pickle
is never read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import Model
from fedjax_peft.models.checkpoint import class_names, read_json
from fedjax_peft.models.head_classes import in_order_of
from fedjax_peft.models.modules import is_inside, replace_module, submodule, submodules
from fedjax_peft.models.names import substituted
from fedjax_peft.models.registry import FAMILIES
from fedjax_peft.peft.base import Adapted, Defaults, Layout, Method
from fedjax_peft.peft.dora import DoRALinear, dora
from fedjax_peft.peft.ia3 import ia3
from fedjax_peft.peft.io.files import (
    LABELS,
    Tensors,
    Values,
    check_fits,
    fit_head,
    read_tensors,
    resolved,
)
from fedjax_peft.peft.io.layouts import LAYOUTS, SHARED, TENSORS, fit_sites
from fedjax_peft.peft.lora import LoRALinear, by_pattern, lora, scaling
from fedjax_peft.peft.prompt import PromptEmbed, prompt_tuning
from fedjax_peft.peft.selective import head_only
from fedjax_peft.support.errors import InputError


@part
def pretrained(adapter: str | Path) -> Method:
    """An adapter trained elsewhere (LoRA, (IA)³, OFT, prompt, bottleneck, ...) as initial values.

    Attaching it sets the adapter's values, and those of the head that the directory holds; other
    leaves keep their values. The method has the name and the options of the adapter, such as
    ``lora``, so the model can be exported again.

    Args:
      adapter: a directory that Hugging Face PEFT wrote (``adapter_config.json`` and
        ``adapter_model.safetensors``), or one in AdapterHub's format.

    Raises:
      InputError: files are missing, damaged or pickle, or a method or an option is not implemented.
        When it is attached: the adapter is for another model or head (mismatches are counted, and
        the first one is named), or its head has other classes. The same classes in another order
        are brought into that of the model.
    """
    directory = Path(adapter)
    config = _read_config(directory)
    if "peft_type" not in config and "config" in config:
        from fedjax_peft.peft.io.adapterhub import load_adapterhub

        return load_adapterhub(directory)
    contents = _read_contents(directory, config)
    read = partial(_READERS[config["peft_type"]], _Config(directory, config))
    method = read(contents)
    made_for = config.get("base_model_name_or_path")

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        sites, problems = fit_sites(module, contents.sites)
        whole, wrong = fit_head(module, head, contents.whole)
        base = f" It was made for {made_for!r}." if made_for else ""
        check_fits(f"The adapter in {directory}", problems + wrong, base)
        _set(whole)
        outside = {name: path for name, path in sites.items() if not is_inside(path, head)}
        for name in sites.keys() - outside.keys():  # the head is trained whole: this is its start
            alone = nnx.List([submodule(module, sites[name])])
            if "lora_A.weight" in contents.sites[name]:  # its rank may be above the layer's sides
                alone[0] = _low_rank_layer(alone[0], method, name, contents.sites[name])
            else:
                read(contents.at({name: "0"})).attach(alone, {}, key, ())
            replace_module(
                module, sites[name], _fill(name, alone[0], contents.sites[name]).merged()
            )
        module = inner(outside).attach(module, defaults, key, head)
        for name, path in outside.items():
            _fill(name, submodule(module, path), contents.sites[name])
        if contents.prompt is not None:
            _set([(_prompt_of(module, contents.prompt, directory), contents.prompt)])
        return module

    def inner(outside: Mapping[str, str]) -> Method:
        """Returns the method without the layers of the head."""
        return head_only() if contents.sites and not outside else read(contents.at(outside))

    named = directory / LABELS
    names = class_names(read_json(named)) if contents.whole and named.is_file() else []

    def complete(model: Model) -> Model:
        model = in_order_of(model, str(directory), names)
        stems = {leaf.rpartition(".")[0]: kind for leaf, kind in model.kinds.items()}
        paths = {name: resolved(name, stems) for name in contents.sites}
        outside = {name: path for name, path in paths.items() if stems.get(path) != "head"}
        held = [n.rpartition(".")[0].removesuffix(".base_layer") for n in contents.whole]
        loaded = [resolved(name, stems) for name in held]
        fresh = tuple(m for m in model.fresh if not any(is_inside(x, (m,)) for x in loaded))
        for name, path in paths.items():
            if is_inside(path, fresh):
                raise InputError(
                    f"The adapter in {directory} changes {name} by an update of low rank, and"
                    f" {model.name!r} does not hold the weights of that layer: load the checkpoint"
                    " that the adapter was made for."
                )
        return model.replace(fresh=fresh, method=inner(outside))

    return Method(method.name, method.options, attach, complete=complete)


def _read_contents(directory: Path, config: Mapping[str, Any]) -> "_Contents":
    """Returns the tensors of an adapter of Hugging Face PEFT whose method is supported."""
    if config.get("peft_type") not in _READERS:
        raise InputError(
            f"The adapter in {directory} has peft_type = {config.get('peft_type')!r}, which is not"
            f" supported ({', '.join(_READERS)} are)."
        )
    file = directory / "adapter_model.safetensors"
    stored = read_tensors(file, "*.bin", "save_pretrained in peft does")
    return _split(_of_one_adapter(stored, directory))


def _low_rank_layer(layer: nnx.Linear, method: Method, name: str, tensors: Tensors) -> Adapted:
    """Returns a layer with the LoRA or DoRA that a file has for it."""
    a, b = (jnp.asarray(tensors[f"lora_{x}.weight"].T) for x in "AB")
    options = method.options
    alpha = options["alpha_pattern"].get(name, options["alpha"])
    make = DoRALinear if method.name == "dora" else LoRALinear
    return make(layer, a, b, scaling(a.shape[1], alpha, options["rslora"]), dropout=0.0)


def _fill(name: str, site: Adapted, tensors: Tensors) -> Adapted:
    """Gives a layer the tensors of a file, and returns it."""
    for kind, tensor in tensors.items():
        variable, x = getattr(site, TENSORS[kind][0]), tensor.T
        if kind in SHARED:
            x = x[tuple(map(slice, variable.shape))]
        if x.size != variable.size:
            raise InputError(
                f"{name}.{kind} is {list(tensor.shape)}, and by the adapter's config it should be"
                f" {list(variable.shape[::-1])}."
            )
        _set([(variable, x)])
    return site


def _set(values: Values) -> None:
    """Sets variables, whose values may lack axes of size 1."""
    for variable, x in values:
        variable.set_value(jnp.asarray(x.reshape(variable.shape), variable.dtype))


# ------------------------------------------------------------------------------------------ files


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "adapter_config.json"
    if not path.is_file():
        what = f"holds no {path.name}" if directory.is_dir() else "is not a directory"
        raise InputError(
            f"There is no adapter in {str(directory)!r}: it {what}. An adapter on the hub must be"
            " fetched first (hf download ID --local-dir DIR)."
        )
    return read_json(path)


class _Contents(NamedTuple):
    """The tensors of an adapter, in torch's layout."""

    sites: dict[str, Tensors]
    """Path of an adapted module -> tensors by kind (a key of ``layouts.TENSORS``)."""
    prompt: np.ndarray | None
    whole: Tensors
    """The other tensors, by name: those of modules that are trained whole."""
    old_names: dict[str, str]
    """Path of an adapted module -> its path in the file."""

    def at(self, paths: Mapping[str, str]) -> "_Contents":
        """Returns the contents with the sites that have a path in the model, under that path."""
        sites = {path: self.sites[name] for name, path in paths.items()}
        olds = {path: self.old_names[name] for name, path in paths.items()}
        return self._replace(sites=sites, old_names=olds)


_OUTSIDE = re.compile(r"^(?:.*\.)?base_model\.(?:model\.)?")
"""What peft puts before the names of its base model, with what is around it."""


def _split(tensors: Tensors) -> _Contents:
    contents = _Contents({}, tensors.pop("prompt_embeddings", None), {}, {})
    shared: Tensors = {}
    for key, x in tensors.items():
        name = _OUTSIDE.sub("", key)
        kind = next((k for k in TENSORS if name.endswith(f".{k}")), None)
        if name in SHARED:
            shared[name] = x
        elif kind is None:
            contents.whole[_renamed(name)] = x
        else:
            path = name.removesuffix(f".{kind}")
            contents.sites.setdefault(_renamed(path), {})[kind] = x
            contents.old_names[_renamed(path)] = path
    for site in contents.sites.values():
        site |= shared
    return contents


_ADAPTER = re.compile(
    r"\.(lora_[AB]|lora_magnitude_vector|ia3_l|modules_to_save|prompt_encoder|oft_R|miss_block"
    r"|hira_[AB]|shira_weight|shira_indices|vera_[AB]|vera_lambda_[bd])\.(?!weight$)([^.]+)"
)
"""A part of a name in the state dict of a peft model, and the adapter's name after it."""
_AS_SAVED = (
    (r"\.modules_to_save\.", "."),
    (r"\.lora_magnitude_vector\.weight$", ".lora_magnitude_vector"),
    (r"^\.prompt_encoder\.embedding\.weight$", ".prompt_embeddings"),
)


def _of_one_adapter(tensors: Tensors, where: Path) -> Tensors:
    """Returns the tensors under the names that ``save_pretrained`` of peft gives them.

    The state dict of a peft model has the adapter's name in them, and the modules that are not used
    because others were trained in their place.

    Raises:
      InputError: the file holds several adapters.
    """
    found: Tensors = {}
    adapters: dict[str, None] = {}
    for name, x in tensors.items():
        if ".original_module." not in name:
            adapters |= dict.fromkeys(found[2] for found in _ADAPTER.finditer(f".{name}"))
            plain = substituted(_ADAPTER.sub(r".\1", f".{name}"), _AS_SAVED)
            found[plain[1:]] = x
    if len(adapters) > 1:
        raise InputError(
            f"The file in {where} holds several adapters ({', '.join(adapters)}): save one of them"
            " (save_pretrained of peft with selected_adapters)."
        )
    return found


def _renamed(name: str) -> str:
    """Returns the present name of a module or tensor; older files of ViT have other names."""
    if family := FAMILIES.get(name.partition(".")[0]):
        for pattern, replacement in family.renamed:
            name = re.sub(pattern, replacement, f"{name}.").removesuffix(".")
    return name


# ---------------------------------------------------------------------------------------- methods


_INERT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode", "revision"),
    "base_model_name_or_path",
    # The tensors tell these.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "feedforward_modules", "num_virtual_tokens", "token_dim"),
    # How torch stores the base's kernels; the adapter's tensors are the same.
    "fan_in_fan_out",
    # Initial values of the adapter, or fields that matter only beside a field that is refused.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "init_ia3_weights"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path"),
    *("tokenizer_kwargs", "num_attention_heads", "num_layers"),
    *("megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
    # Of MiSS and OFT beside a value that is refused, or without an effect in PEFT.
    *("mini_r", "eps", "module_dropout", "init_weights", "mask_type", "random_seed"),
    *("projection_prng_key", "rank_pattern"),
}
"""Config fields that do not change what the tensors mean."""

_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that do not change the base weights."""

_NUMBER = (int, float)


class _Config:
    """An ``adapter_config.json`` that knows which of its fields were used."""

    def __init__(self, directory: Path, values: Mapping[str, Any]):
        self.directory = directory
        self.values = values
        self.used = set(_INERT)

    def get(self, field: str, default: Any, types: tuple[type, ...] | None = None) -> Any:
        """Returns a field's value, checked to be of one of the types (the default's)."""
        self.used.add(field)
        value = self.values.get(field)
        if value is None:
            return default
        types = types or (type(default),)
        if type(value) not in types:
            raise InputError(
                f"The adapter in {self.directory} has {field} = {value!r}, which is not of type"
                f" {' or '.join(t.__name__ for t in types)}."
            )
        return value

    def patterns(self, field: str, types: tuple[type, ...]) -> dict[str, Any]:
        """Returns a table from regular expressions to numbers."""
        table = self.get(field, {})
        for key, value in table.items():
            try:
                re.compile(key)
            except re.error as error:
                raise InputError(
                    f"The adapter in {self.directory} has {field} for {key!r}, which is not a"
                    f" regular expression ({error})."
                ) from None
            if type(value) not in types:
                raise InputError(
                    f"The adapter in {self.directory} has {field}[{key!r}] = {value!r}, which is no"
                    " such number."
                )
        return table

    def check_used(self) -> None:
        """Raises InputError for fields that are set and have an effect that is not implemented."""
        unset: tuple[Any, ...] = (None, False, "none", "", [], {})
        others = {f: v for f, v in self.values.items() if f not in self.used and v not in unset}
        if others:
            listed = ", ".join(f"{field} = {value!r}" for field, value in sorted(others.items()))
            raise InputError(
                f"The adapter in {self.directory} has {listed}, which is not implemented."
            )


def _low_rank(config: _Config, contents: _Contents) -> Method:
    start = config.get("init_lora_weights", True, (bool, str))
    if start not in _STARTS:
        raise InputError(
            f"The adapter in {config.directory} has init_lora_weights = {start!r}. Only starts that"
            " leave the base model as it was can be read (true, false, 'gaussian', 'eva',"
            " 'orthogonal'): save it again with peft's path_initial_model_for_weight_conversion,"
            " which makes it one for the original model."
        )
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8, _NUMBER)
    ranks = config.patterns("rank_pattern", (int,))
    alphas = config.patterns("alpha_pattern", _NUMBER)
    # Hugging Face PEFT matches the patterns with the names in the file.
    olds = contents.old_names.items()
    each_rank = {path: by_pattern(ranks, old, rank) for path, old in olds}
    each_alpha = {path: by_pattern(alphas, old, alpha) for path, old in olds}
    options = {
        "rank": rank,
        "alpha": alpha,
        "targets": tuple(sorted(contents.sites)),
        "init": "gaussian" if start == "gaussian" else "kaiming",
        "dropout": config.get("lora_dropout", 0.0, _NUMBER),
        "rslora": config.get("use_rslora", False),
        "rank_pattern": {path: r for path, r in each_rank.items() if r != rank},
        "alpha_pattern": {path: a for path, a in each_alpha.items() if a != alpha},
    }
    weights = {"lora_A.weight", "lora_B.weight"}
    make: Callable[..., Method] = lora
    if config.get("use_dora", False):
        weights, make = {*weights, "lora_magnitude_vector"}, dora
    config.check_used()
    for path, tensors in _sites_of(config, contents, weights):
        if tensors["lora_A.weight"].shape[:1] != (each_rank[path],):
            raise InputError(
                f"In the adapter in {config.directory}, {path}.lora_A.weight is"
                f" {list(tensors['lora_A.weight'].shape)}, but its config has rank"
                f" {each_rank[path]}."
            )
    return make(**options)


def _ia3(config: _Config, contents: _Contents) -> Method:
    config.check_used()
    sites = dict(_sites_of(config, contents, {"ia3_l"}))
    inner = sorted(path for path, tensors in sites.items() if tensors["ia3_l"].shape[:1] == (1,))
    return ia3(targets=sorted(sites), feed_forward=inner)


def _prompt(config: _Config, contents: _Contents) -> Method:
    if config.values.get("num_transformer_submodules") == 1:  # 2: another one for a decoder
        config.used.add("num_transformer_submodules")
    config.check_used()
    if contents.prompt is None or contents.prompt.ndim != 2:
        raise InputError(f"The adapter in {config.directory} has no prompt_embeddings.")
    return prompt_tuning(len(contents.prompt))


def _by_layout(
    layout: Layout, make: Callable[..., Method], config: _Config, contents: _Contents
) -> Method:
    """Returns a method whose layers each have their own tensors; ``make`` is its function."""
    for field, wanted in layout.constant.items():
        if config.get(field, wanted, (type(wanted), str)) != wanted:
            raise InputError(
                f"The adapter in {config.directory} has {field} = {config.values[field]!r}. Only"
                f" {wanted!r} can be read."
            )
    options = {
        option: config.get(field, default, _NUMBER if type(default) is float else None)
        for field, (option, default) in layout.options.items()
    }
    config.check_used()
    sites = dict(_sites_of(config, contents, set(layout.tensors)))
    return make(targets=sorted(sites), **options)


_READERS: dict[str, Callable[[_Config, _Contents], Method]] = {
    "LORA": _low_rank,
    "IA3": _ia3,
    "PROMPT_TUNING": _prompt,
    **{layout.peft_type: partial(_by_layout, layout, make) for layout, make in LAYOUTS.values()},
}


def _sites_of(
    config: _Config, contents: _Contents, kinds: set[str]
) -> Iterator[tuple[str, Tensors]]:
    """Yields (path, tensors) of the adapted modules; each must have tensors of all these kinds."""
    if not contents.sites:
        raise InputError(f"The adapter in {config.directory} holds no {min(kinds)} tensors.")
    for path, tensors in sorted(contents.sites.items()):
        if odd := sorted(kinds ^ tensors.keys()):
            what = "is missing" if odd[0] in kinds else "is not used"
            raise InputError(f"In the adapter in {config.directory}, {path}.{odd[0]} {what}.")
        yield path, tensors


def _prompt_of(module: nnx.Module, prompt: np.ndarray, directory: Path) -> nnx.Variable:
    (site,) = (m for _, m in submodules(module, PromptEmbed))
    if site.prompt.shape != prompt.shape:
        raise InputError(
            f"The adapter in {directory} does not fit this model: its prompt_embeddings are"
            f" {list(prompt.shape)}, the model needs {list(site.prompt.shape)}."
        )
    return site.prompt
