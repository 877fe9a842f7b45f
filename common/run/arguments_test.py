"""The command line of the training scripts."""

import pytest

from common.errors import UserError
from common.run.arguments import parse_arguments


@pytest.mark.parametrize(("words", "key"), [(["--help-config", "fp16"], "fp16.dtype"), (["--help-config"], "MIXUP: ")])
def test_help_on_the_config_needs_no_config(words, key, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        parse_arguments(words, "")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert key in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("MODEL.widht", "MODEL.width"),
        ("learning_rate", "LEARNING_RATE"),
        ("lr", "LEARNING_RATE"),
        ("Depth", "MODEL.depth"),
    ],
)
def test_help_on_an_unknown_key_names_the_nearest(name, known):
    with pytest.raises(UserError, match=f"{name}: unknown key; did you mean '{known}'"):
        parse_arguments(["--help-config", name], "")
    with pytest.raises(UserError, match=f"{name}: unknown key"):
        parse_arguments(["--config", "quickstart", "--allow-change", name], "")


@pytest.mark.parametrize("words", [["--find-lr"], ["--profile", "3"]])
def test_what_a_measurement_ignores_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="--resume run: .* use --init"):
        parse_arguments(["--config", "quickstart", "--resume", "run", *words], "")
