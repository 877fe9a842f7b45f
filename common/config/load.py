"""Load a config: run its file, check every key, fill in defaults, derive the rest. `load_config`
shows the order.
"""

import ast
import re
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import configs
from common.colossal import AMP_TYPE, check_compile, check_zero, resolve_parallel
from common.config.fields import check_given, parse, values_of
from common.config.model_keys import data_of
from common.config.schema import Config, find_key
from common.errors import UserError, did_you_mean, is_first_process, print_wrapped
from common.files import read_bytes, short_path

CONFIGS = Path(configs.__path__[0])
PREDEFINED = {
    "AMP_TYPE": AMP_TYPE
}  # without an import, as Colossal-AI's benchmark prints its config files
# What replaces a key's value, in order: [(("depth",), 6)] for --set MODEL.depth=6, [((), 6)] for
# the value itself.
Overrides = Mapping[str, Sequence[tuple[tuple[str, ...], Any]]]
# What the config files of Colossal-AI's public examples call a key.
RENAMED = {
    "seed": "SEED",
    "LOG_PATH": "OUTPUT",
    "DROP_RATE": "MODEL.dropout",
    "dali.root": "DATA.root",
}
# What Colossal-AI documents for NAIVE and APEX, and has no meaning here.
WITHOUT_EFFECT = {
    "cast_model_outputs",
    "cast_model_type",
    "hysteresis",
    "keep_batchnorm_fp32",
    "log_num_zeros_in_grad",
    "loss_scale",
    "master_weights",
    "max_loss_scale",
    "max_scale",
    "min_loss_scale",
    "min_scale",
    "num_losses",
    "patch_torch_functions",
    "verbose",
    "verbosity",
}
# What `_read_sections` takes out of sections of the config.
ORIGINAL = {f"fp16.{key}" for key in {*WITHOUT_EFFECT, "initial_scale"}} | {"parallel.data"}
# What a config says for itself: how a batch is cut.
STATED = {"TOTAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "BATCH_SIZE"}


def load_config(name: str, settings: Sequence[str] = (), base: str | None = None) -> dict[str, Any]:
    """Return the config ``name`` (a path, or a recipe of ``configs/``) with ``settings``
    (``KEY=VALUE``) applied.

    ``base`` names the recipe from which a config without MODEL takes what it leaves out; a line on
    stdout says so. Raises `UserError` for a file that is not there or does not run, and for unknown
    keys and wrong values.
    """
    overrides = parse_settings(settings)
    path = find_config(name, base)
    values, used = execute(
        path, overrides
    )  # where the file assigns a key of the settings, it gets theirs
    values = {key: value for key, value in values.items() if not _is_helper(key, used)}
    assigned = set(values)
    recipe = {}
    if base and "MODEL" not in values:
        recipe, _ = execute(
            find_config(base),
            {**overrides, **{key: [((), value)] for key, value in values.items()}},
        )
    notes = read_original(values, recipe, base)
    for key, changes in overrides.items():
        if key in values or key not in assigned:  # else read as another key, its setting included
            values[key] = override(changes, values.get(key))
    _print_notes(str(path), _read_sections(values) + notes)
    _leave_one(values, overrides)
    where = f"{path} or --set" if "MODEL" in overrides else str(path)
    config = _complete(values, where)
    check_compile(config)
    return config


def _complete(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check ``values``; return them with defaults, what MODEL says of DATA and INIT, and
    ``parallel``.
    """
    checked = parse(Config, values, where)
    checked.check_conflicts()
    config = checked.model_dump()
    config["DATA"] |= {
        k: v for k, v in data_of(config["MODEL"]).items() if k not in (values.get("DATA") or {})
    }
    if config["MODEL"].get("pretrained"):
        config["INIT"] = config["INIT"] or config["MODEL"]["timm"]
    config["parallel"] = _derive_parallel(config)
    check_zero(config)
    return config


def load_own_config(config: Any) -> dict[str, Any]:
    """Return the config of a user's own script: a dict, a path, or the name of a recipe.

    ``parallel`` is derived and Colossal-AI's keys (lower case) are checked, as `load_config` does.
    With MODEL, as in the recipes, so are all keys, and defaults are filled in; else UPPER CASE is
    the script's own. Unknown keys in UPPER CASE stay; raises `UserError` for those in lower case.
    """
    if isinstance(config, Mapping):
        values, used, where = dict(config), set(), "config"
    else:
        values, used = execute(find_config(str(config)), {})
        where = str(config)
    _print_notes(where, _read_sections(values))
    known = [key for key in Config.model_fields if key.islower()]
    for key in values:
        if key.islower() and key not in {*known, *RENAMED, "dali"} and not _is_helper(key, used):
            raise UserError(
                f"{where}: unknown key {key}: keys in lower case are Colossal-AI's "
                f"({', '.join(known)}); write your own in upper case"
            )
    is_whole = "MODEL" in values
    checked = {
        key for key in values if is_whole or key.islower() or key.startswith("TENSOR_PARALLEL_")
    }
    known = {key: values[key] for key in checked & Config.model_fields.keys()}
    required = {
        "MICRO_BATCH_SIZE",
        *(key for key, field in Config.model_fields.items() if field.is_required()),
    }
    whole = _complete(known if is_whole else dict.fromkeys(required, 1) | known, where="config")
    return values | {key: whole[key] for key in (whole if is_whole else {*known, "parallel"})}


def restore_config(
    values: Mapping[str, Any], settings: Sequence[str], where: str
) -> dict[str, Any]:
    """Return a config that was read back from JSON, checked, with ``settings`` (``KEY=VALUE``)
    applied.

    Raises `UserError` for unknown keys and wrong values, naming the file ``where`` it comes from.
    """
    changed = {
        key: override(changes, values.get(key)) for key, changes in parse_settings(settings).items()
    }
    return parse(Config, {**values, **changed}, where).model_dump()


def _print_notes(where: str, notes: Sequence[str]) -> None:
    if notes and is_first_process():
        print_wrapped(f"{where}: {'; '.join(notes)}")


def _read_sections(values: dict[str, Any]) -> list[str]:
    """Take Colossal-AI's other keys of NAIVE and APEX out of ``fp16``, and ``data`` of
    ``parallel``; return how each was read.
    """
    notes = []
    parallel = values.get("parallel")
    if isinstance(parallel, Mapping) and "data" in parallel:
        values["parallel"] = {key: value for key, value in parallel.items() if key != "data"}
        notes.append(
            f"parallel.data={parallel['data']!r} as nothing: it follows from the number of "
            "processes"
        )
    fp16 = values.get("fp16")
    if not isinstance(fp16, Mapping):
        return notes
    values["fp16"] = {key: value for key, value in fp16.items() if key not in WITHOUT_EFFECT}
    if "initial_scale" in fp16:
        values["fp16"]["init_scale"] = values["fp16"].pop("initial_scale")
        notes.append(f"fp16.initial_scale as fp16.init_scale={fp16['initial_scale']!r}")
    if unused := [f"fp16.{key}" for key in fp16 if key in WITHOUT_EFFECT]:
        notes.append(f"without effect here: {', '.join(unused)}")
    return notes


def find_config(name: str, base: str | None = None) -> Path:
    """Return the path that ``name`` stands for: itself, else a recipe, with or without ``configs/``
    and ``.py``.

    In a task whose ``base`` recipe is vit_s16_vanilla, ``vit_1d`` is vit_s16_1d, as Colossal-AI's
    benchmark names it.
    """
    if Path(name).is_file():
        return Path(name)
    stem = re.sub(r"^(\./)?(configs?/)?", "", name).removesuffix(".py")
    if base and base.endswith("_vanilla"):
        stem = re.sub(r"^vit_(?=(vanilla|1d|2d|2p5d|3d)$)", base.removesuffix("vanilla"), stem)
    recipes = sorted(path.stem for path in CONFIGS.glob("[!_]*.py"))
    if stem in recipes:
        return CONFIGS / f"{stem}.py"
    raise UserError(
        f"--config {name}: no such file or recipe{did_you_mean(stem, recipes)}; ls "
        f"{short_path(CONFIGS)} lists them"
    )


def _is_helper(name: str, used: set[str]) -> bool:
    """Tell a variable of the file's own, which the file itself reads, from a misspelt key."""
    if name in Config.model_fields or name in RENAMED:
        return False
    return name in used and not get_close_matches(name, Config.model_fields, 1, 0.8)


def _leave_one(values: dict[str, Any], overrides: Overrides) -> None:
    """Keep only the overridden one of MICRO_BATCH_SIZE and ``gradient_accumulation`` if
    TOTAL_BATCH_SIZE gives both.
    """
    if values.get("TOTAL_BATCH_SIZE") is None:
        return
    micro, accumulation = (
        key in overrides and values[key] for key in ("MICRO_BATCH_SIZE", "gradient_accumulation")
    )
    if micro and not accumulation:
        values["gradient_accumulation"] = values["BATCH_SIZE"] = None
    elif accumulation and not micro:
        values["MICRO_BATCH_SIZE"] = None


def _derive_parallel(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``parallel``, made from ``TENSOR_PARALLEL_SIZE`` and ``_MODE`` where it is None;
    refuse contradictions.
    """
    size, mode = config["TENSOR_PARALLEL_SIZE"], config["TENSOR_PARALLEL_MODE"]
    parallel = config["parallel"] or {}
    tensor = dict(size=size, mode=mode) | (parallel.get("tensor") or {})
    if size not in (1, tensor.get("size")) or mode not in (None, tensor.get("mode")):
        raise UserError(
            f"TENSOR_PARALLEL_SIZE={size}, TENSOR_PARALLEL_MODE={mode!r} contradict "
            f"parallel.tensor={tensor!r}"
        )
    if tensor.get("mode") == "2.5d":
        tensor = dict(depth=1) | tensor
    return resolve_parallel(dict(parallel, tensor=tensor), world_size=tensor.get("size", 1))


def read_original(values: dict[str, Any], recipe: Mapping[str, Any], name: str | None) -> list[str]:
    """Replace the examples' key names in ``values``, add what is left out, and return how each key
    was read.

    ``recipe`` is that of the task, called ``name``, for a config without MODEL; else it is empty.
    Colossal-AI's keys (lower case) mean without a value what they mean there. Raises `UserError`
    for a key under both names; of a key inside MODEL or DATA, the example's name counts.
    """
    notes = _read_dali(values)
    named = {RENAMED.get(name, name) for name in values} | STATED
    left_out = [
        name
        for name in recipe
        if name.isupper() and name in Config.model_fields and name not in named
    ]
    values.update({name: recipe[name] for name in left_out})
    notes += [_rename(values, old, new) for old, new in RENAMED.items() if old in values]
    batch, accumulation = values.get("BATCH_SIZE"), values.get("gradient_accumulation") or 1
    if (
        recipe
        and "TOTAL_BATCH_SIZE" not in values
        and isinstance(batch, int)
        and isinstance(accumulation, int)
    ):
        del values["BATCH_SIZE"]
        if "MICRO_BATCH_SIZE" in recipe:  # this task's originals count it on each GPU
            values["MICRO_BATCH_SIZE"] = batch
            notes.append(f"BATCH_SIZE as MICRO_BATCH_SIZE={batch}, per GPU")
        else:
            values["TOTAL_BATCH_SIZE"] = batch * accumulation
            notes.append(
                f"BATCH_SIZE as TOTAL_BATCH_SIZE={values['TOTAL_BATCH_SIZE']}, over all GPUs"
            )
    if left_out:
        notes.append(f"left out, so as in the recipe {name}: {', '.join(left_out)}")
    return notes


def _rename(values: dict[str, Any], old: str, new: str) -> str:
    value = values.pop(old)
    section, _, key = new.partition(".")
    if key:
        inside = values.get(section) or {}
        values[section] = {**inside, key: value} if isinstance(inside, Mapping) else inside
    elif section in values:
        raise UserError(f"{old}={value!r} and {new}={values[new]!r} are the same key: keep {new}")
    else:
        values[section] = value
    return f"{old} as {new}={value!r}"


def _read_dali(values: dict[str, Any]) -> list[str]:
    if not isinstance(values.get("dali"), Mapping):
        return []
    dali, notes = dict(values.pop("dali")), []
    if "mixup_alpha" in dali:
        values["MIXUP"] = dali.pop("mixup_alpha")
        notes.append(f"dali.mixup_alpha as MIXUP={values['MIXUP']!r}")
    if "root" in dali:
        values["dali.root"] = dali.pop("root")  # beside the recipe's DATA, by _rename
    if "gpu_aug" in dali:
        notes.append(
            f"dali.gpu_aug={dali.pop('gpu_aug')!r} as nothing: DALI decodes where the run trains"
        )
    if dali:
        raise UserError(
            f"unknown key dali.{next(iter(dali))}: known are dali.root, dali.mixup_alpha and "
            "dali.gpu_aug"
        )
    return notes


def parse_settings(settings: Sequence[str]) -> Overrides:
    """Return the overrides of ``KEY=VALUE`` settings; raise `UserError` for an unknown key."""
    overrides: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write it as KEY=VALUE")
        # MODEL may be timm's, whose arguments are checked with the whole of it
        takes_text = (
            not name.startswith("MODEL.")
            and name not in ORIGINAL
            and values_of(find_key(name)).startswith("text")
        )
        key, *inside = name.split(".")
        overrides.setdefault(key, []).append((tuple(inside), _parse_value(text, takes_text)))
    return overrides


def override(changes: Sequence[tuple[tuple[str, ...], Any]], value: Any) -> Any:
    """Return ``value`` with what overrides it."""
    for path, new in changes:
        value = _replace(value, path, new)
    return value


def _replace(value: Any, path: tuple[str, ...], new: Any) -> Any:
    if not path:
        return new
    inside = value if isinstance(value, Mapping) else {}
    return {**inside, path[0]: _replace(inside.get(path[0]), path[1:], new)}


def _parse_value(text: str, takes_text: bool) -> Any:
    """Evaluate what a config file could assign; anything else is text, as is DATA.root=2012."""
    try:
        value = eval(text, {"__builtins__": {"dict": dict, "float": float}, **PREDEFINED})
    except Exception:
        return text
    return value if not takes_text or value is None or isinstance(value, str) else text


def execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    """Return what a config file assigns, with ``overrides`` in force where it does, and the names
    that others use.

    The plain values that it assigns hold in the recipes that it imports too (``from configs.x
    import *``), so that what those derive follows: after ``TOTAL_BATCH_SIZE = 512`` their
    ``BATCH_SIZE = TOTAL_BATCH_SIZE // 2`` is 256.

    Raises `UserError` for a file that does not run, with the line that fails.
    """
    try:
        return _execute(path, overrides)
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise UserError(
            f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
        ) from error
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{place.filename}, line {place.lineno}: {type(error).__name__}: {error}"
        ) from error


def _execute(path: Path, overrides: Overrides) -> tuple[dict[str, Any], set[str]]:
    tree = ast.parse(read_bytes(path), str(path))
    plain = _read_ahead(tree.body, overrides)
    computed = (
        set().union(*(_names(node, ast.Store) for node in tree.body))
        - plain.keys()
        - overrides.keys()
    )
    in_recipes = {**overrides, **{name: [((), value)] for name, value in plain.items()}}
    names: dict[str, Any] = {"__file__": str(path), **PREDEFINED}
    used: set[str] = set()
    recipes: dict[str, dict[str, Any]] = {}
    for node in tree.body:
        module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
        beside = path.parent / f"{module}.py"
        if not module.startswith("configs.") and not (module and beside.is_file()):
            _run(node, path, names, overrides)
            own = (
                _names(node, ast.Store) if isinstance(node, ast.Assign) else set()
            )  # SIDE = 2 * SIDE
            used |= _names(node, ast.Load) - own
            continue
        where = f"{path}, line {node.lineno}"
        if module not in recipes:
            recipes[module], read = _execute(
                beside if beside.is_file() else _find_recipe(module, where), in_recipes
            )
            if late := sorted(computed & read):
                raise UserError(
                    f"{where}: {module} derives other keys from {late[0]}: assign a plain value to "
                    "it here"
                )
            used |= read
        assert isinstance(node, ast.ImportFrom)
        wanted = {alias.name: alias.asname or alias.name for alias in node.names}
        if missing := wanted.keys() - recipes[module].keys() - {"*"}:
            raise UserError(f"{where}: {module} has no {', '.join(missing)}")
        names |= (
            recipes[module]
            if "*" in wanted
            else {own: recipes[module][name] for name, own in wanted.items()}
        )
    skipped = (types.ModuleType, type)
    return {
        k: v for k, v in names.items() if not k.startswith("_") and not isinstance(v, skipped)
    }, used


def _read_ahead(body: list[ast.stmt], overrides: Overrides) -> dict[str, Any]:
    """Return the values that a file assigns without use of its imports."""
    plain: dict[str, Any] = {}
    late: set[str] = set()  # names in statements that use imports
    for node in body:
        stored = _names(node, ast.Store)
        with suppress(Exception):
            if isinstance(node, ast.Assign) and not late & stored:
                value = eval(
                    compile(ast.Expression(node.value), "", "eval"), {**PREDEFINED, **plain}
                )
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
                plain |= {name: override(overrides.get(name, ()), value) for name in targets}
                continue
        late |= stored | _names(node, ast.Load)
        plain = {name: value for name, value in plain.items() if name not in stored}
    return plain


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a statement reads (`ast.Load`) or assigns (`ast.Store`)."""
    nodes = ast.walk(statement)
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _run(node: ast.stmt, path: Path, names: dict[str, Any], overrides: Overrides) -> None:
    """Run a statement; the keys that it assigns get what overrides them."""
    try:
        exec(compile(ast.Module([node], []), str(path), "exec"), names)
    except (
        Exception
    ):  # blame it on a given value that is wrong by itself, if one is, not on what derives from it
        check_given(
            Config,
            {
                key: override(changes, None)
                for key, changes in overrides.items()
                if not changes[0][0]
            },
        )
        raise
    for name in _names(node, ast.Store) & overrides.keys() & names.keys():
        names[name] = override(overrides[name], names[name])


def _find_recipe(module: str, where: str) -> Path:
    """Return the file of ``from configs.x import ...``, ``vit_b16`` for ``vit-b16.py`` too."""
    files = {f"configs.{file.stem.replace('-', '_')}": file for file in CONFIGS.glob("[!_]*.py")}
    if module not in files:
        raise UserError(f"{where}: no recipe {module}{did_you_mean(module, files)}")
    return files[module]
