"""Write a saved model for other programs, compare what they compute from it, and describe it in a model card.

python scripts/export.py outputs/vit-b16 --to timm
python scripts/export.py outputs/vit-b16 --to onnx --output /tmp/vit

timm            model.safetensors, for timm.create_model; the folder is laid out as the Hugging Face Hub expects
safetensors     model.safetensors alone, with everything that config.json says in its header
onnx            model.onnx, for batches of any size

Beside it lie README.md, the model card, and config.json: architecture, preprocessing and class names, as timm has them.
``--push`` uploads all of it to the Hugging Face Hub, with the token in HF_TOKEN or that of `hf auth login`.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from huggingface_hub import HfApi, get_token
from safetensors import safe_open
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from common.checkpoint.saved_run import SavedRun, build_parser, open_run
from common.errors import UserError, first_line
from common.files import short_path
from common.tools.model_card import write_model_card
from common.tools.timm_format import describe_for_timm

WEIGHTS = "model.safetensors"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # of the largest logit; float32 in another order of operations stays below a tenth of it

Forward = Callable[[Tensor], Tensor]


def main(argv: list[str]) -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--to", required=True, choices=WRITERS, help="format")
    parser.add_argument("--output", metavar="DIR", help="default: export/<checkpoint>/<format> in the run's folder")
    parser.add_argument("--push", metavar="USER/NAME", help="upload the export to the Hugging Face Hub")
    args = parser.parse_args(argv)
    run = open_run(args.run, raw=args.raw)
    if args.push and not get_token():
        raise UserError(f"--push {args.push} needs a token of the Hugging Face Hub: set HF_TOKEN, or run hf auth login")
    output = Path(args.output or run.folder / "export" / run.checkpoint.name / args.to)
    difference = export(run, args.to, output)
    print(f"checkpoint {short_path(run.checkpoint)} ({run.chosen})")
    print(f"checked    logits differ from the checkpoint's by {difference:.1e} of the largest")
    print(f"exported   {short_path(output)}", flush=True)
    if args.push:
        print(f"pushed     {push(output, args.push)}")


def push(folder: Path, name: str) -> str:
    """Upload ``folder`` as the Hugging Face Hub's model ``<user>/<name>``, made if it is not there; return its URL."""
    try:
        url = HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Export")
    except Exception as error:  # the Hub's and the network's have no type in common
        raise UserError(
            f"--push {name}: {first_line(error)}; the export is in {folder}: `hf upload {name} {folder}` uploads it"
        ) from error
    return url


def export(run: SavedRun, target: str, output: Path) -> float:
    """Write the run's model to the folder ``output`` for ``target``, a key of `WRITERS`; read it back and compare.

    Returns the largest difference between the logits of what was written and the model's, as a share of the largest
    logit. Raises `UserError` where that is more than rounding explains.
    """
    missing = [name for name in ONNX_PACKAGES if target == "onnx" and not find_spec(name)]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}: pip install {' '.join(missing)}")
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output} is not empty: choose another folder with --output DIR, or remove it")
    model, size = run.load_model(), run.config["MODEL"]["image_size"]
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.json").write_text(json.dumps(describe_for_timm(run), indent=2) + "\n")
        exported = WRITERS[target](model, size, output)
        write_model_card(run, target, output)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); choose another") from error
    difference = _compare(model, exported, size)
    if not difference < TOLERANCE:
        raise UserError(
            f"{output}: its logits differ from the checkpoint's by {difference:.1e} of the largest: do not use it"
        )
    return difference


@torch.no_grad()
def _compare(model: nn.Module, exported: Forward, size: int) -> float:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 3, size, size, generator=generator)
    expected = model(images)
    found = torch.cat([exported(images[:1]), exported(images[1:])])  # batches of two sizes
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _write_timm(model: nn.Module, size: int, output: Path) -> Forward:
    _save(model, output, {"format": "pt"})
    return timm.create_model(f"local-dir:{output.resolve()}", pretrained=True).eval()


def _write_safetensors(model: nn.Module, size: int, output: Path) -> Forward:
    metadata = {"format": "pt", "config": (output / "config.json").read_text()}
    _save(model, output, metadata)
    with safe_open(output / WEIGHTS, "pt") as file:
        read = VisionTransformer(**json.loads(file.metadata()["config"])["model_args"]).eval()
        read.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118, it is no dict
    return read


def _write_onnx(model: nn.Module, size: int, output: Path) -> Forward:
    import onnxruntime

    path = output / "model.onnx"
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 3, size, size),),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with the folders of this machine
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


WRITERS: dict[str, Callable[[nn.Module, int, Path], Forward]] = {
    "timm": _write_timm,
    "safetensors": _write_safetensors,
    "onnx": _write_onnx,
}


def _save(model: nn.Module, output: Path, metadata: dict[str, str]) -> None:
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    (output / WEIGHTS).write_bytes(save(weights, metadata))  # save_file would let nobody else read it
