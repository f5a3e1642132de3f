"""Several processes that share a mesh adopt the same step at the same time."""

import process_child
import pytest
from follow_child import digest
from process_runs import Run, told
from saved_steps import save_step


def publish(folder, step):
    model = process_child.model()
    model.set_weights([value + step for value in model.get_weights()])
    save_step(model, folder, step, weights_only=True)
    return digest(model)


@pytest.mark.slow
def test_two_processes_adopt_the_same_steps(tmp_path):
    folder, published = tmp_path / "run", {}
    with Run(2, 4, "1x8", "follow", folder, 3, module="follow_child") as run:
        for step in (1, 2, 3):
            published[step] = publish(folder, step)
            if step == 2:  # adopted before, or never
                (folder / "2" / "shardload" / "digests.json").write_text("{}")
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    assert all(one.returncode == 0 for one in run.started), outputs
    first, second = (told(output) for output in outputs)
    assert first == second and first[-1]["step"] == 3, outputs
    assert all(line["digest"] == published[line["step"]] for line in first)


@pytest.mark.slow
def test_none_adopts_a_step_that_one_process_fails_to_complete(tmp_path):
    published = publish(tmp_path / "run", 1)
    with Run(2, 4, "1x8", "fail", tmp_path / "run", 1, module="follow_child") as run:
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    failed = {"adopted": None, "problem": True, "same": True}
    assert [told(output) for output in outputs] == [[failed, {"step": 1, "digest": published}]] * 2, outputs
