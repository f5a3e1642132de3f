"""Copies of a process that has imported everything: to a test they are processes like others."""

import os
import signal
import subprocess

import pytest
import warm_start

pytestmark = pytest.mark.slow


def test_a_copy_has_words_settings_and_a_folder_of_its_own_and_tells_its_code(tmp_path):
    code = "import os, sys; print(sys.argv, os.environ['ITS'], os.getcwd()); print('so', file=sys.stderr); sys.exit(3)"
    done = warm_start.run(["-c", code, 1], cwd=tmp_path, env={**os.environ, "ITS": "own"})
    assert (done.returncode, done.stdout, done.stderr) == (3, f"['-c', '1'] own {tmp_path}\n", "so\n")


def test_a_copy_starts_without_devices_and_with_randomness_of_its_own():
    code = "import jax, numpy, random; jax.config.update('jax_num_cpu_devices', 3)\n"
    code += "print(jax.device_count()); print(random.random(), numpy.random.rand())"
    first, second = (warm_start.run(["-c", code], check=True).stdout.split("\n") for _ in range(2))
    assert first[0] == second[0] == "3" and not set(first[1].split()) & set(second[1].split())


def test_an_exception_ends_a_copy_with_a_traceback():
    child = warm_start.start(["-c", "1 / 0"], stderr=subprocess.STDOUT)
    said, nothing = child.communicate(timeout=60)
    assert (child.returncode, nothing) == (1, None)
    assert said.endswith("ZeroDivisionError: division by zero\n")


def test_what_a_process_beside_it_says_later_is_heard():
    beside = "import time; time.sleep(1); print('afterwards')"
    code = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {beside!r}]); os.kill(os.getpid(), 9)"
    child = warm_start.start(["-c", code])
    assert child.wait(60) == -9 and child.communicate(timeout=60) == ("afterwards\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_copy_can_be_waited_for_and_killed(number):
    child = warm_start.start(["-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    assert child.poll() is None
    child.send_signal(number)
    assert child.wait(60) == -number
    child.kill()  # does nothing any more


def test_what_is_read_at_import_is_not_too_late():
    """JAX reads these when it is imported, so this is a fresh process."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    assert warm_start.run(["-c", "import jax; print(jax.device_count())"], env=env, check=True).stdout == "2\n"
