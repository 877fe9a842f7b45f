"""Write a saved model for other programs, and compare what they compute from it.

python scripts/export.py outputs/vit-b16 --to timm
python scripts/export.py outputs/vit-b16 --to onnx --output /tmp/vit

timm            model.safetensors, for timm.create_model; the folder is laid out as the
                Hugging Face Hub expects
safetensors     model.safetensors alone, with everything that config.json says in its header
onnx            model.onnx, for batches of any size: images [B, 3, H, W] to logits [B, classes];
                its metadata has class names and preprocessing

Beside it lies config.json: architecture, preprocessing and class names, as timm has them.
"""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from common.checkpoint.saved_run import SavedRun, open_run
from common.config.model_keys import NOT_IN_TIMM
from common.errors import UserError
from common.files import own_file, short_path, writing
from common.model.build import timm_architecture
from common.process import ends_cleanly
from common.task import find_task
from common.tools.arguments import build_parser, name_classes

WEIGHTS = "model.safetensors"
# A fraction of the largest logit. float32 in another order of operations differs by a tenth of it.
TOLERANCE = 1e-4
OPSET = 18  # torch's exporter writes this one, and converts it to others

Forward = Callable[[Tensor], Tensor]


@ends_cleanly
def main(argv: list[str]) -> None:
    parser = build_parser(__doc__, takes_temperature=True)
    parser.add_argument("--to", required=True, choices=FORMATS, help="format")
    parser.add_argument(
        "--output", metavar="DIR", help="default: export/<checkpoint>[-raw]/<format>, in the run"
    )
    args = parser.parse_args(argv)
    run = replace(open_run(args.run, raw=args.raw), temperature=args.temperature or 1.0)
    name_classes(run, args.classes)
    name = run.checkpoint.name + ("-raw" if args.raw else "")
    output = Path(args.output or run.folder / "export" / name / args.to)
    difference = export(run, args.to, output)
    print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})")
    print(f"checked    logits differ from the checkpoint's by {difference:.1e} of the largest")
    opset = f" (opset {OPSET})" if args.to == "onnx" else ""
    divided = f", logits divided by {run.temperature:g}" if args.temperature else ""
    print(f"exported   {short_path(output)}{opset}{divided}", flush=True)


def export(run: SavedRun, target: str, output: Path) -> float:
    """Write the run's model to the folder ``output``, read it back and compare.

    ``target`` is a key of `FORMATS`. Returns the largest difference between the logits of what was
    written and the model's, as a share of the largest logit. Raises `UserError` where that is more
    than rounding explains.
    """
    if target == "onnx" and not find_spec("onnxscript"):
        raise UserError("--to onnx needs more packages: pip install onnx onnxruntime onnxscript")
    if output.is_dir() and any(output.iterdir()):
        raise UserError(
            f"{output} is not empty: choose another folder with --output DIR, or remove it"
        )
    # `set_exportable` avoids operators that torch.onnx cannot convert for batches of any size.
    with timm.layers.set_exportable(True):
        model = run.load_model()
    size = run.config["MODEL"]["image_size"]
    hf_config = describe_for_timm(run, model)
    if target == "timm" and hf_config["architecture"] == "none":
        missing = " and no ".join(f"{key}={value!r}" for key, value in NOT_IN_TIMM)
        raise UserError(f"--to timm: timm has no {missing} of MODEL; export to safetensors or onnx")
    description = own_file(output / "config.json")
    try:
        with writing(output):
            # Written first: the writers of timm's and safetensors' files read it.
            description.write_text(json.dumps(hf_config, indent=2) + "\n")
            exported = FORMATS[target](_divide_head(model, run.temperature), size, output)
        difference = _compare(lambda images: model(images) / run.temperature, exported, size)
        if not difference < TOLERANCE:  # `not <` holds for NaN too
            raise UserError(
                f"{output}: its logits differ from the checkpoint's by {difference:.1e} of the "
                "largest"
            )
    except BaseException:
        # Half an export is of no use, and would be in the way of the next.
        for file in output.iterdir():
            file.unlink()
        raise
    return difference


def describe_for_timm(run: SavedRun, model: Any) -> dict[str, Any]:
    """Return the config.json that ``timm.create_model("local-dir:...")`` reads.

    The layout is that of timm/models/_hub.py, `save_config_for_hf`.
    """
    size = run.config["MODEL"]["image_size"]
    classes = run.config["MODEL"]["num_classes"]
    data = run.config["DATA"]
    short_side = find_task(run.metadata["task"]).build_eval_crop(data, size).short_side
    architecture, arguments = timm_architecture(**run.config["MODEL"])
    known = getattr(model, "pretrained_cfg", {})  # only timm's models have one
    heads = list(model.head_names)
    # Timm writes `num_classes` once, above: transformers passes both, and fails if there are two.
    arguments = {name: value for name, value in arguments.items() if name != "num_classes"}
    return {
        "architecture": architecture,
        "num_classes": classes,
        "num_features": model.get_submodule(heads[0]).weight.shape[1],
        "label_names": run.class_names,
        "temperature": run.temperature,  # the head has it already; timm ignores it
        "model_args": arguments,
        "checkpoint": f"{run.checkpoint.name}/{run.weights}",  # timm ignores it
        "pretrained_cfg": {
            "num_classes": classes,
            "input_size": [3, size, size],
            # Our ViT's, as timm's: its position embedding is for one size.
            "fixed_input_size": known.get("fixed_input_size", True),
            "interpolation": data["interpolation"],
            "crop_pct": crop_share(size, short_side),
            "crop_mode": "center",
            "mean": list(data["mean"]),
            "std": list(data["std"]),
            "first_conv": known.get("first_conv", "patch_embed.proj"),
            "classifier": heads[0] if len(heads) == 1 else heads,
        },
    }


def crop_share(size: int, short_side: int) -> float:
    """Return the ``crop_pct`` for which timm's ``floor(size / crop_pct)`` is ``short_side``."""
    # timm has a fraction where DATA.eval_crop gives a short side.
    share = size / short_side
    # Rounding may make the quotient a little less than the short side, whose floor is one less.
    return share if math.floor(size / share) == short_side else math.nextafter(share, 0)


def _divide_head(model: nn.Module, temperature: float) -> nn.Module:
    """Return a copy of ``model`` whose logits are divided by ``temperature``."""
    copy: Any = deepcopy(model)
    for name in copy.head_names:
        for parameter in copy.get_submodule(name).parameters():
            parameter.data /= temperature
    return copy


@torch.no_grad()
def _compare(model: Forward, exported: Forward, size: int) -> float:
    """Return the largest difference of the logits, as a share of the largest logit."""
    # A seed of its own: a global one would change what a caller draws.
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, size, size, generator=generator)
    expected = model(images)
    # Two sizes of batches: an ONNX file may hold the one it was traced with.
    logits = torch.cat([exported(images[:1]), exported(images[1:])])
    return ((logits - expected).abs().max() / expected.abs().max()).item()


def _write_timm(model: nn.Module, size: int, output: Path) -> Forward:
    _save(model, output, {"format": "pt"})
    # Read back by timm itself, as its users do.
    return timm.create_model(f"local-dir:{output.resolve()}", pretrained=True).eval()


def _write_safetensors(model: nn.Module, size: int, output: Path) -> Forward:
    _save(model, output, {"format": "pt", "config": (output / "config.json").read_text()})
    read = deepcopy(model)  # a copy: the file's weights are compared with those of `model`
    read.load_state_dict(load_file(output / WEIGHTS))
    return read


def _write_onnx(model: nn.Module, size: int, output: Path) -> Forward:
    import onnxruntime

    path = output / "model.onnx"
    program = torch.onnx.export(
        model,
        # A batch of 1 would be taken for a constant.
        (torch.zeros(2, 3, size, size),),
        input_names=["images"],
        output_names=["logits"],
        opset_version=OPSET,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # they hold stack traces, with this machine's folders
    hf_config = json.loads((output / "config.json").read_text())
    program.model.metadata_props["class_names"] = json.dumps(hf_config["label_names"])
    program.model.metadata_props["preprocessing"] = json.dumps(hf_config["pretrained_cfg"])
    program.save(path)
    # The CPU, whatever is installed: only it computes as the checkpoint's model did.
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


FORMATS = {
    "timm": _write_timm,
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
}


def _save(model: nn.Module, output: Path, metadata: dict[str, str]) -> None:
    """Write the weights with ``metadata`` in their header."""
    # safetensors takes no views, such as a transposed weight.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    # safetensors' save_file would let nobody else read the file.
    (output / WEIGHTS).write_bytes(save(weights, metadata))
