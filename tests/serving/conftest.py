"""A certificate for servers on this machine."""

import subprocess
from types import SimpleNamespace

import pytest

SCRIPT = """
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=authority -days 2 -keyout ca.key -out ca.pem
openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out request.pem
printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\\nbasicConstraints=CA:FALSE\\n' > extensions
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out cert.pem
"""


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The file of the authority that a client trusts, and the options of a server."""
    made = tmp_path_factory.mktemp("tls")
    try:
        subprocess.run(["openssl", "version"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl")
    subprocess.run(["bash", "-e"], input=SCRIPT.encode(), check=True, capture_output=True, cwd=made)
    options = ("--tls-cert", made / "cert.pem", "--tls-key", made / "key.pem")
    return SimpleNamespace(path=str(made / "ca.pem"), options=options)
