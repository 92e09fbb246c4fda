"""What a run's folder says of its models."""

from pathlib import Path

from gdn2.models.run_folder import checkpoint_of, checkpoint_path, step_of, step_of_model


def test_a_checkpoint_is_known_by_its_name(tmp_path: Path) -> None:
    for step in (0, 7, 123_456_789):
        assert step_of(checkpoint_path(tmp_path, step)) == step
    for name in ("step-7", "step-00000007.partial", ".step-00000007", "model"):
        assert step_of(tmp_path / name) is None


def test_the_step_of_a_model_is_its_checkpoints_or_the_last_whole_line_s(tmp_path: Path) -> None:
    assert step_of_model(checkpoint_path(tmp_path / "checkpoints", 30) / "model") == 30
    assert step_of_model(tmp_path / "model") is None
    (tmp_path / "config.json").write_text('{"run": {}, "schedule": {}}')
    lines = [f'{{"step": {step}, "tokens": {10 * step}}}\n' for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 3, "tok')  # a kill
    assert step_of_model(tmp_path / "model") == 2


def test_a_run_may_be_called_like_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "step-00001000"
    run.mkdir()
    assert checkpoint_of(run / "model") is None
    assert step_of_model(run / "model") is None
    inside = checkpoint_path(run / "checkpoints", 2)
    assert checkpoint_of(inside / "model") == inside
    (run / "config.json").write_text('{"run": {}, "schedule": {}}')
    (run / "metrics.jsonl").write_text('{"step": 2, "tokens": 20}\n')
    assert step_of_model(run / "model") == 2


def test_metrics_of_another_program_say_nothing_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    assert step_of_model(tmp_path / "model") is None
