"""A recipe, planned from the command line without data."""

from cifar10_benchmark import train


def test_dry_run_of_a_recipe_needs_no_data_and_downloads_nothing(tmp_path, capsys):
    settings = ["--set", f"DATA.root={tmp_path}", "--set", "DATA.download=True"]
    train.main(["--config", "vit_lite_vanilla", "--dry-run", "--gpus", "8", *settings])
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs x 64 x 1 = 512" in printed
    assert "is not read, as DATA.download may write to it: times assume 50,000 images" in printed
    assert list(tmp_path.iterdir()) == []
