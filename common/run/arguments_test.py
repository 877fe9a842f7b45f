"""The command line of the training scripts."""

import pytest

from common.errors import UserError
from common.run.arguments import parse_arguments


@pytest.mark.parametrize(("words", "key"), [(["--help-config", "fp16"], "fp16.dtype"), (["--help-config"], "`MIXUP`")])
def test_help_on_the_config_needs_no_config(words, key, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(words, "")
    assert ended.value.code == 0
    assert key in capsys.readouterr().out


def test_help_on_an_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match="MODEL.widht: unknown key; did you mean 'MODEL.width'"):
        parse_arguments(["--help-config", "MODEL.widht"], "")
