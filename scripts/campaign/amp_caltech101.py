"""Pieces: mixed precision on Caltech-101."""

from collections.abc import Iterator

from caltech101_amp.compare import CONFIGS, compare, summarise
from caltech101_amp.dataset import CATEGORIES, IMAGES
from campaign.job import Job, Row
from campaign.made_images import write_folders

SIZE = 300, 200  # about Caltech-101's
TINY = ("MODEL.image_size=16", "MODEL.patch_size=8", "MODEL.width=32", "MODEL.depth=1", "MODEL.heads=2",
        "TOTAL_BATCH_SIZE=8", "DATA.workers=0")  # fmt: skip


def amp_caltech101(job: Job) -> Iterator[Row]:
    """Train ViT-B/16 at batch 128 in every mode of mixed precision, images decoded from files as training does."""
    data, images = job.data.get("caltech"), "Caltech-101"
    if data is None or job.tiny:
        names = ["accordion", *(f"category {number}" for number in range(1, CATEGORIES))]
        size = (20, 16) if job.tiny else SIZE
        data, images = write_folders(job.new_folder("images"), names, -(-IMAGES // CATEGORIES), *size), f"made, {size}"
    settings = [*(TINY if job.tiny else ()), f"DATA.root={data}"]
    steps, rounds, configs = (1, 1, dict(list(CONFIGS.items())[:2])) if job.tiny else (20, 3, CONFIGS)
    figures = compare(settings, job.new_folder("runs"), steps, rounds, configs)
    for mode in figures:
        yield {"images": images} | summarise(mode, figures) | {"steps": steps, "rounds": rounds}
