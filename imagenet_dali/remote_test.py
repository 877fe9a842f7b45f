"""Data sets in object storage: reading, preparing and verifying them, over a proxy that fails in every way."""

import getpass
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common import object_store
from common.checkpoint.save import newest_checkpoint
from common.config.schema import Data
from common.data.record_reader import RecordReader
from common.data.sampler import TrainSampler
from common.errors import UserError
from common.object_store import PIECE, as_path, list_files
from common.testing.commands import forked, read_folder, run_forked
from common.testing.object_store import BUCKET, SECRET, Store, running_store
from common.testing.ranks import free_port, run_ranks
from common.tools import evaluate
from imagenet_dali import prepare, train_dali
from imagenet_dali.dataset import open_split
from imagenet_dali.task import build_train_loader
from imagenet_dali.testing import prepare_data, with_flipped_bit, write_config, write_images

SHARD = "train/train-00000-of-00003"
URL = f"s3://{BUCKET}/data"


@pytest.fixture(scope="module")
def servers() -> Iterator[Store]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(servers: Store, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The servers without faults, with `prepared` at `URL`, and credentials in the environment."""
    for name, value in servers.environ.items():
        monkeypatch.setenv(name, value)
    servers.fault, servers.latency = lambda *_: None, 0.0
    servers.upload(prepared)
    return servers


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a new process, since obstore does not survive forks, which other tests make."""
    return run_ranks(1, function, *args)[0]


def global_batches(root: Path | str, dp_size: int, start: int = 0) -> list[list[tuple[bytes, int]]]:
    split, ranks = open_split(root, "train"), []
    for rank in range(dp_size):
        place = dict(dp_rank=rank, dp_size=dp_size, blocks=split.block_bounds(20_000), window=2)
        reader = RecordReader(split)
        draws = TrainSampler(len(split), 16, 16 // dp_size, **place).draws(1, start)
        ranks.append([[(bytes(image), label) for image, label in records] for _, records in reader.read(draws)])
        reader.close()
    return [list(itertools.chain(*rows)) for rows in zip(*ranks, strict=True)]


def random_batches(root: Path | str) -> list[torch.Tensor]:
    """Return the images that workers decode in random order."""
    data = Data(root=str(root), loader="torchvision", order="random", workers=1).model_dump()
    loader = build_train_loader(data, 48, 48, image_size=8, dp_rank=0, dp_size=1, seed=0, device=torch.device("cpu"))
    found = [images for images, _ in loader]
    loader.close()
    return found


def test_faults_of_the_service_neither_lose_nor_change_anything(store: Store, prepared: Path) -> None:
    whole = global_batches(prepared, 1)
    assert sorted(itertools.chain(*whole)) == sorted(map(_plain, map(open_split(prepared, "train").read, range(240))))
    web = f"http://{store.host}/{BUCKET}/data"
    for url, dp_size, start in ((URL, 1, 0), (URL, 2, 0), (URL, 4, 7), (URL, 8, 0), (web, 2, 7)):
        store.fault = shards_only(503, None, "cut", None, "short", None, 500, None)
        assert in_fork(global_batches, url, dp_size, start) == whole[start:], (url, dp_size, start)
    store.fault = lambda *_: None
    assert all(map(torch.equal, in_fork(random_batches, URL), random_batches(prepared)))


def _plain(record: tuple[memoryview, int]) -> tuple[bytes, int]:
    return bytes(record[0]), record[1]


def test_latency_is_hidden_by_reading_ahead(store: Store) -> None:
    def seconds() -> float:
        split = open_split(URL, "train")
        reader, start = RecordReader(split), time.monotonic()
        blocks = dict(blocks=split.block_bounds(8_000), window=1)
        assert sum(len(records) for _, records in reader.read(TrainSampler(240, 8, 8, **blocks).draws(0))) == 240
        reader.close()
        return time.monotonic() - start

    requests, store.latency = store.requests, 0.2
    took, requests = in_fork(seconds), store.requests - requests
    assert requests > 20
    assert took < 0.5 * requests * store.latency


def read_after(change: Callable[[], object]) -> str:
    """Return the error of reading a shard that ``change`` comes before, after the data set was opened."""
    object_store.PATIENCE, object_store.RETRYING = 0.5, timedelta(seconds=0.2)
    split = open_split(URL, "train")
    change()
    try:
        list(RecordReader(split).read(TrainSampler(240, 8, 8).draws(0)))
    except UserError as error:
        return str(error)
    return ""


def test_only_the_first_read_waits_for_a_server_that_is_silent(store: Store) -> None:
    def seconds() -> list[float]:
        object_store.PATIENCE, object_store.RETRYING = 3.0, timedelta(seconds=0.2)
        split, clock = open_split(URL, "train"), [time.monotonic()]
        for _ in range(2):
            with pytest.raises(UserError, match="the server answers 500"):
                split.read(0)
            clock.append(time.monotonic())
        return [end - start for start, end in itertools.pairwise(clock)]

    store.fault = lambda method, path: 500 if method == "GET" and SHARD in path else None
    first, second = in_fork(seconds)
    assert first > 3.0 > second


@pytest.mark.slow
def test_a_shard_that_changes_under_the_run_is_named(store: Store, prepared: Path, capfd) -> None:
    def put(content: bytes) -> None:
        store.request("PUT", f"/{BUCKET}/data/{SHARD}", content)

    content = (prepared / SHARD).read_bytes()
    changed = f"{URL}/{SHARD}: has changed since the run opened it; restore it"
    for other in (with_flipped_bit(content, 99), content[:-10]):
        assert in_fork(read_after, partial(put, other)).startswith(changed)
        put(content)
    gone = in_fork(read_after, partial(store.request, "DELETE", f"/{BUCKET}/data/{SHARD}"))
    assert gone == f"{URL}/{SHARD}: not there any more; restore it and rerun the command"
    put(content)

    for fault, message in ((500, "the server answers 500 after"), ("short", "the server's answers are incomplete")):
        store.fault = shards_only(fault)
        error = in_fork(read_after, lambda: None)
        assert error.startswith(f"{URL}/train/")
        assert message in error
        assert message.removesuffix(" after") in capfd.readouterr().err.partition("warning: s3://")[2]


def shards_only(*faults: int | str | None) -> Callable[[str, str], int | str | None]:
    """Return a `Store.fault` of requests for shards, one after the other."""
    following = itertools.cycle(faults)
    return lambda method, path: next(following) if method == "GET" and "/train/" in path else None


def test_training_and_evaluation(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, config = prepare_data(tmp_path / "tiny"), write_config(tmp_path)
    url, models = store.upload(data), []
    for root, output in ((data, tmp_path / "local"), (url, tmp_path / "remote")):
        said = [f"DATA.root={root}", "DATA.workers=1", "DATA.block=0.005", "NUM_EPOCHS=2"]
        said += [f"DATA.cache={tmp_path / 'cache'}", "DATA.cache_gb=0.1"] if root == url else ["DATA.order=blocks"]
        words = [word for setting in said for word in ("--set", setting)]
        store.fault = shards_only(None, 503, "cut", None, "short")
        ended = run_forked(train_dali.main, ["--config", config, "--output", output, *words])
        assert ended.code == 0, ended.stderr
        models.append((output / "checkpoints/step-00000006/model.safetensors").read_bytes())
    assert models[0] == models[1]
    resumed, words = tmp_path / "resumed", words[:8]  # without the cache
    command = ["--config", config, "--output", resumed, *words]
    shards = itertools.count()
    store.fault = lambda method, path: 500 if "/train/" in path and next(shards) > 20 else None
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "PATIENCE", 0.5)
        patch.setattr(object_store, "RETRYING", timedelta(seconds=0.2))
        failed = run_forked(train_dali.main, command)
    checkpoint, line = newest_checkpoint(resumed / "checkpoints"), failed.stderr.splitlines()[-1]
    assert (failed.code, line.startswith(f"error: {url}/train/"), checkpoint.name) == (2, True, "step-00000003")
    assert line.endswith(f"check the network and the service, and rerun the command to resume from {checkpoint}")
    store.fault = lambda *_: None
    assert run_forked(train_dali.main, command).code == 0
    assert (newest_checkpoint(resumed / "checkpoints") / "model.safetensors").read_bytes() == models[0]
    said = " ".join(ended.stdout.split())
    assert "reading in blocks, since 0.1 MB of training shards are remote; holding" in said
    assert f" of them per process; caching up to 0.1 GB in {tmp_path / 'cache'} " in said
    seen: list[str] = []
    store.fault = lambda _, path: seen.append(path)
    evaluated = run_forked(evaluate.main, [output])
    assert evaluated.stdout.splitlines()[-1].startswith("top1=")
    assert len(seen) < 40
    assert not any("/validation/" in path for path in seen)  # in the cache
    everything = [*read_folder(output).values(), *ended[1:], *evaluated[1:]]
    assert not any(SECRET in str(content) for content in everything)
    refused = run_forked(
        train_dali.main, ["--config", config, *words, "--set", f"DATA.root=https://me:{SECRET}@host/x"]
    )
    message = "error: https://host/x: give the URL without user, password or query"
    assert (refused.code, refused.stderr.startswith(message), SECRET in refused.stderr) == (2, True, False)


def objects(store: Store, prefix: str) -> dict[str, bytes]:
    def read() -> dict[str, bytes]:
        root = as_path(f"s3://{BUCKET}/{prefix}")
        return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*")}

    return in_fork(read)


@pytest.mark.slow
def test_preparation_is_resumed(store: Store, tmp_path: Path) -> None:
    images, url, puts = write_images(tmp_path / "images", 40), f"s3://{BUCKET}/made", []
    command = [images, url, "--workers", "1", "--shards", "4"]
    assert run_forked(prepare.main, [images, tmp_path / "made", *command[2:]]).code == 0

    def count(method: str, path: str) -> None:
        puts.extend([path] * (method == "PUT"))

    store.fault, store.latency = count, 0.05
    with forked(prepare.main, command) as (process, *_):
        while not any(".partial/train" in path and "00001" in path for path in puts):
            time.sleep(0.01)
        process.kill()
    store.latency = 0.0
    ended = run_forked(prepare.main, command)
    assert (ended.code, ended.stdout.splitlines()[-1]) == (0, f"{url}: 2 classes; 0 images converted, 0 refused")
    assert sum("/train/" in path and "00000" in path and ".partial" not in path for path in puts) == 1
    expected = {path: content for path, content in read_folder(tmp_path / "made").items() if content is not None}
    assert objects(store, "made") == {str(path): content for path, content in expected.items()}
    assert run_forked(prepare.main, command).stdout == f"{url}: complete already\n"
    assert run_forked(prepare.main, ["--check", url, "--workers", "1"]).stdout == f"{url}: every record is verified\n"
    name = "train/train-00002-of-00004"
    spoilt = with_flipped_bit(expected[next(path for path in expected if str(path) == name)], 500)
    store.request("PUT", f"/{BUCKET}/made/{name}", spoilt)
    checked = run_forked(prepare.main, ["--check", url, "--workers", "1"])
    assert f"{url}/{name}: record 0 at byte 0: checksum of the data does not match" in checked.stdout
    assert (checked.code, checked.stderr.startswith(f"error: {url}: faults found: 1;")) == (2, True)
    repaired = run_forked(prepare.main, ["--check", "--repair", "--max-refused", "0.1", url, "--workers", "1"])
    assert repaired.stdout.splitlines()[-1] == f"{url}: every remaining record is verified"
    assert in_fork(lambda: len(open_split(url, "train"))) == 63


def test_large_files_are_written_in_parts(store: Store, tmp_path: Path) -> None:
    path, methods = tmp_path / "large", []
    path.write_bytes(b"large" * (PIECE // 4))
    store.fault = lambda method, _: methods.append(method)

    def upload() -> bytes:
        with path.open("rb") as file:
            as_path(f"s3://{BUCKET}/large").upload(file)
        return as_path(f"s3://{BUCKET}/large").read_bytes()

    assert in_fork(upload) == path.read_bytes()
    assert methods[:4] == ["POST", "PUT", "PUT", "POST"]


REFUSED: dict[str, tuple[str, dict[str, str], int | None, str]] = {
    "no such bucket": ("s3://other/data", {}, None, "s3://other/data: no such bucket; check the name, and"),
    "no such data set": (f"s3://{BUCKET}/other", {}, None, f"s3://{BUCKET}/other: no such folder; name the folder of"),
    "no credentials": (
        URL,
        {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"},  # where a machine of Amazon's has its role's
        None,
        f"{URL}/manifest.json: no credentials in the environment; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "not allowed": (URL, {}, 403, f"{URL}/manifest.json: access denied; check the credentials in the environment"),
    "no answer": (URL, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, None, f"{URL}/manifest.json: no connection"),
    "a source": (
        f"s3://{BUCKET}/images s3://{BUCKET}/data",
        {},
        None,
        f"s3://{BUCKET}/images: SOURCE has to be a local folder; only DEST may be a URL",
    ),
    "query": (f"{URL}?X-Amz-Signature={SECRET}", {}, None, f"{URL}: give the URL without user, password or query"),
    "no bucket": ("s3:///data", {}, None, "s3:///data: no bucket or host in this URL"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_places_are_named_with_the_remedy(store: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, environ, fault, message = REFUSED[name]
    if name == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store.fault = lambda *_: fault
    ended = run_forked(prepare.main, url.split() if " " in url else ["--check", url], **environ)
    assert ended.code == 2
    assert ended.stderr.startswith(f"error: {message}")
    assert len(ended.stderr.splitlines()) == 1
    assert SECRET not in ended.stdout + ended.stderr


def test_a_folder_that_was_made_in_a_console_is_empty(store: Store) -> None:
    def look() -> tuple[bool, list[Path], list[str]]:
        root = as_path(f"s3://{BUCKET}/folder")
        before = root.exists()
        with Path(__file__).open("rb") as file:
            (root / "train-0").upload(file)
        return before, list(root.iterdir()), list(list_files(root, ["train-0", "manifest.json"]))

    store.request("PUT", f"/{BUCKET}/folder/")
    assert in_fork(look) == (False, [as_path(f"s3://{BUCKET}/folder/train-0")], ["train-0"])


def test_what_the_manifest_does_not_fit_is_refused(store: Store, prepared: Path) -> None:
    store.request("PUT", f"/{BUCKET}/data/{SHARD}", (prepared / SHARD).read_bytes()[:-10])
    with pytest.raises(RuntimeError, match=rf"UserError: {URL}/{SHARD}: \d+ bytes, not \d+ as in the manifest; run"):
        in_fork(open_split, URL, "train")
    store.request("DELETE", f"/{BUCKET}/data/{SHARD}")
    with pytest.raises(RuntimeError, match=rf"UserError: {URL}/{SHARD}: missing; copy it"):
        in_fork(open_split, URL, "train")


@pytest.mark.launchers
def test_nginx(prepared: Path, tmp_path: Path) -> None:
    """Debian's nginx instead of the S3 server."""
    assert Path("/usr/sbin/nginx").exists(), "apt-get install nginx-light"
    port, config = free_port(), tmp_path / "nginx.conf"
    logs = f"pid {tmp_path}/pid; error_log {tmp_path}/error.log;"
    server = f"server {{ listen 127.0.0.1:{port}; root {prepared.parent}; }}"
    config.write_text(f"daemon off; user {getpass.getuser()}; {logs} events {{}} http {{ access_log off; {server} }}")
    with subprocess.Popen(["/usr/sbin/nginx", "-c", config, "-p", tmp_path, "-e", tmp_path / "error.log"]) as nginx:
        try:
            root = f"http://127.0.0.1:{port}/{prepared.name}"
            assert in_fork(global_batches, root, 2) == global_batches(prepared, 1)
        finally:
            nginx.terminate()
