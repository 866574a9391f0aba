import pytest


@pytest.fixture
def hosts(tmp_path):
    """Writes a file of hosts."""

    def write(text):
        path = tmp_path / "hosts.txt"
        path.write_text(text)
        return path

    return write
