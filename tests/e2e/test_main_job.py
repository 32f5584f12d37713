"""The real commands on a small task: reward rises, what is written can be read, mistakes are explained."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.e2e.conftest import Job, slipstream

KEYS = {
    "steps",
    "wall_s",
    "eval_first",
    "eval_last",
    "samples_trained",
    "rollouts_by_outcome",
    "dropped_by_reason",
    "lag_mean",
    "lag_max",
    "max_off_policy_steps",
    "engine_busy_frac",
    "trainer_busy_frac",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "mismatch_kl_mean",
    "versions_published",
    "ledger_balanced",
}


@pytest.fixture(scope="module")
def finished(job: Job) -> Job:
    result = job.rl("clean")
    assert result.returncode == 0, result.stderr
    return job


def test_the_run_ends_balanced_within_its_lag_bound_and_better_than_it_began(finished):
    summary = finished.summary("clean")
    assert summary.keys() >= KEYS
    assert summary["ledger_balanced"] is True and summary["steps"] == 30 and summary["versions_published"] >= 30
    assert summary["lag_max"] <= summary["max_off_policy_steps"]
    assert summary["samples_trained"] == 30 * 64
    assert summary["eval_first"] < 0.5 and summary["eval_last"] > 0.75


def test_engine_and_trainer_agree_on_fresh_tokens(finished):
    assert finished.summary("clean")["mismatch_kl_mean"] < 0.05


def test_the_final_folder_loads_in_transformers_and_generates(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = finished.runs / "clean" / "final"
    AutoModelForCausalLM.from_pretrained(final)
    assert AutoTokenizer.from_pretrained(final).chat_template
    said = slipstream("generate", final, "1+2+3", "--max-tokens", "8")
    assert said.returncode == 0 and said.stdout.strip(), said.stderr


def test_report_and_rollouts_can_be_read(finished):
    folder = finished.runs / "clean"
    report = slipstream("report", folder)
    assert report.returncode == 0 and (folder / "report.html").stat().st_size > 10_000, report.stderr
    read = slipstream("rollouts", folder, "--outcome", "completed", "--limit", "2")
    assert read.returncode == 0 and "assistant" in read.stdout


def test_a_finished_run_refuses_to_start_again_without_resume(finished):
    again = finished.rl("clean")
    assert again.returncode == 2 and "already holds a run" in again.stderr and "Traceback" not in again.stderr


def test_a_finished_run_can_be_prolonged(finished):
    shutil.copytree(finished.runs / "clean", finished.runs / "longer", dirs_exist_ok=True)
    longer = finished.rl("longer", "--resume", "--set", "max_steps=33")
    # The copied config.toml names the run 'clean'; a run is what its folder says, so the name may not differ.
    assert longer.returncode == 2 and "name" in longer.stderr
    longer = finished.rl("clean", "--resume", "--set", "max_steps=33")
    assert longer.returncode == 0, longer.stderr
    assert finished.summary("clean")["steps"] == 33
    steps = [step for _, step in finished.trained("clean")]
    assert sorted(set(steps)) == list(range(1, 34))


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        (["trainer.optim.lrr=1"], "did you mean 'trainer.optim.lr'"),
        (["model.path=/nowhere"], "/nowhere"),
        (['envs=[{"id": "reverse-tekst"}]'], "reverse-text"),
        (["model.seq_len=100000", "trainer.row_tokens=100000"], "max_position_embeddings"),
    ],
)
def test_a_users_mistake_is_one_clear_line_before_anything_starts(job, sets, named):
    result = job.rl("mistake", *(x for s in sets for x in ("--set", s)))
    assert result.returncode == 2 and named in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and not (job.runs / "mistake" / "ledger.sqlite").exists()


def test_dry_run_prints_what_would_happen_and_starts_nothing(job):
    result = job.rl("dry", "--dry-run")
    assert result.returncode == 0 and "# trainer:" in result.stdout and "max_off_policy_steps" in result.stdout
    assert not (job.runs / "dry").exists()


def test_eval_scores_a_folder(job):
    result = slipstream("eval", job.config, "--json", "--set", "eval.tasks=16")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)["calculator"]
    assert scores["tasks"] == 16 and 0 <= scores["avg_at_k"] <= scores["pass_at_k"] <= 1
