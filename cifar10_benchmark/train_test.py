"""The recipes, planned from the command line without data."""

from cifar10_benchmark import train


def test_dry_run_of_the_recipes_needs_no_data_and_downloads_nothing(tmp_path, capsys):
    (tmp_path / "note").touch()
    for recipe, batch in (
        ("vit_lite_vanilla", "8 GPUs x 64 x 1 = 512"),
        ("vit_lite_cct", "1 GPU x 128 x 1 = 128"),
    ):
        settings = ["--set", f"DATA.root={tmp_path}", "--set", "DATA.download=True"]
        train.main(["--config", recipe, "--dry-run", "--gpus", batch[0], *settings])
        printed = " ".join(capsys.readouterr().out.split())
        assert batch in printed
        assert "(the host's limit)" not in printed
        assert "3.7 M" in printed  # arXiv 2104.05704, table 3
        assert (
            "is not read, as DATA.download may write to it: times assume 50,000 images" in printed
        )
    assert list(tmp_path.iterdir()) == [tmp_path / "note"]
