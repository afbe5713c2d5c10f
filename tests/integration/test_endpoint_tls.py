"""`openai:https://...`: an authority of one's own, a server that wants to see a certificate, files that are of no use."""

from pathlib import Path

import pytest

from certificates import Certificates, certificates
from endpoint_stand_in import StandIn, serving
from gpu_pool.backends.backend import Item
from gpu_pool.backends.openai_endpoint.backend import Endpoint, EndpointAway
from gpu_pool.backends.openai_endpoint.requests import HandBack
from gpu_pool.backends.openai_endpoint.settings import read_address
from gpu_pool.config import Access
from scheduler.errors import StartError


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    """Of an authority that no system knows."""
    return certificates(tmp_path)


async def answer(server: StandIn, access: Access) -> str:
    endpoint = Endpoint(read_address(f"openai:{server.url}"), access)
    try:
        await endpoint.load(within_s=0.0)
        found = await endpoint.answer([Item("hello")], lambda: None)
    finally:
        await endpoint.close()
    assert not isinstance(found, HandBack)
    return found[0].output


async def test_both_sides_show_their_certificates(made: Certificates) -> None:
    """The server's is checked against the file of authorities, ours is sent."""
    files = {"ca_file": str(made.authority.cert), "cert_file": str(made.client.cert), "key_file": str(made.client.key)}
    with serving(StandIn(), made.demanding()) as server:
        assert server.url.startswith("https:")
        assert await answer(server, Access(**files)) == "olleh"


async def test_without_a_certificate_the_server_hangs_up(made: Certificates) -> None:
    """The endpoint counts as away, since nothing of it was heard."""
    with serving(StandIn(), made.demanding()) as server, pytest.raises(EndpointAway):
        await answer(server, Access(ca_file=str(made.authority.cert)))


async def test_a_server_of_another_authority_is_not_spoken_to(made: Certificates) -> None:
    """No key is sent to whoever cannot show who it is."""
    with serving(StandIn(api_key="sk-1"), made.demanding()) as server:
        with pytest.raises(EndpointAway, match="Certificate"):
            await answer(server, Access("sk-1"))
        assert (server.looks, server.calls) == (0, [])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ca_file": "absent.pem"}, r"^TIERLANE_ENDPOINT_CA_FILE: 'absent.pem' cannot be used: No such file"),
        ({"cert_file": "absent.pem"}, r"^TIERLANE_ENDPOINT_CERT_FILE: 'absent.pem' cannot be used: No such file"),
        ({"key_file": ""}, r"^TIERLANE_ENDPOINT_CERT_FILE: "),
    ],
)
def test_files_that_are_of_no_use_refuse_the_start(made: Certificates, changes: dict[str, str], fault: str) -> None:
    """One sentence names the setting."""
    files = {"ca_file": str(made.authority.cert), "cert_file": str(made.client.cert), "key_file": str(made.client.key)}

    with pytest.raises(StartError, match=fault):
        Endpoint(read_address("openai:https://127.0.0.1:1/v1"), Access(**files | changes))
