from common.data.corrupt_images import NAMED, BadImages, join_some, reason_of


def test_each_image_is_named_once_and_not_more_than_twenty(capsys):
    bad = BadImages(10_000)
    bad.add(["a", "b", "a"])
    assert capsys.readouterr().err == "skipped: a\nskipped: b\n"
    bad.start_pass()
    bad.add(["b", *(str(number) for number in range(30))])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == NAMED - 2
    assert lines[0] == "skipped: 0"
    assert lines[-1] == "skipped: 17; further images are not named"
    assert bad.count == 31


def test_a_reason_is_one_line_and_the_same_each_time():
    error = ValueError("cannot identify image file <_io.BytesIO object at 0x7f>")
    assert reason_of(error) == "cannot identify image file"
    assert reason_of(OSError("broken\n  data")) == "broken data"
    assert reason_of(KeyError()) == "KeyError"


def test_join_some():
    assert join_some([]) == ""
    assert join_some(["a", "b"]) == "a, b"
    assert join_some([str(number) for number in range(1007)], 2) == "0, 1 and 1,005 more"
