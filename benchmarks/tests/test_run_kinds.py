"""Scripts of further kinds: functional loops, Runners, and trainers that generate; each with figures."""

from script_runs import MIB, peaks, run


def by_phase(report):
    return {item.phase: item for item in report.phases}


def test_a_functional_loop_has_a_gradient_for_each_sample(tmp_path):
    report = run("functional_loop.py", tmp_path=tmp_path)
    parameters = 256 * 1024 + 1024 + 1024 * 16 + 16
    held = 3 * parameters * 4 / MIB  # of the network, as they are now, and momenta
    of_samples = 8 * parameters * 4 / MIB
    assert held + of_samples < peaks(report)[0] < held + 3 * of_samples + 9, "with the workspace of cuBLAS"


def test_the_runner_of_mmengine_trains_and_validates(tmp_path):
    report = run("mmengine_runner.py", needs=("mmengine", "cv2"), tmp_path=tmp_path)
    parameters = 64 * 2048 + 2048 + 2048 * 10 + 10
    held = 2 * 1024 * 2048 * 4  # of a layer, before and after ReLU
    assert by_phase(report)["evaluation"].allocated_bytes > held + 3 * parameters * 4 and not report.missing


def test_an_evaluation_that_generates_is_seen_with_its_cache(tmp_path):
    report = run("seq2seq_generate.py", "48", needs=("transformers", "accelerate"), tmp_path=tmp_path)
    assert report.ending == "the script ended" and not report.missing
    cached = 2 * 2 * 64 * 47 * 64 * 4  # keys and values of two layers, 64 rows, 47 tokens
    assert by_phase(report)["generation"].allocated_bytes > cached + by_phase(report)["loading"].allocated_bytes
    assert by_phase(report)["generation"].count >= 48


def test_policy_optimization_generates_to_the_greatest_length(tmp_path):
    report = run("grpo.py", "tiny", "64", needs=("trl", "transformers", "datasets"), tmp_path=tmp_path)
    assert not report.missing and by_phase(report)["generation"].count >= 64
    assert {step.shapes[0][1] for step in report.steps} <= set(range(40 + 64, 60 + 64 + 1)), "prompt and completion"
    assert any("only repeat the ones before them" in item for item in report.assumptions)
    assert any("is not run again" in item for item in report.assumptions)
    logits = 8 * 64 * 1003 * 2  # of the completions
    assert by_phase(report)["backward"].allocated_bytes > by_phase(report)["loading"].allocated_bytes + 2 * logits
