"""The client against the simulator over real HTTP: every trap of the vendor, and what the client makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from lockstep.kernel.clock import FakeClock
from lockstep.kernel.errors import InvalidInput, Terminal, Transient
from lockstep.kernel.retry import RetryPolicy
from lockstep.vaults.registry import Login, check_url, login_of
from lockstep.windows.client import BurstSpent, VaultClient, WrongVault
from lockstep.windows.listing import Published, read_listing
from lockstep.windows.model import WindowKind
from tests.simulator import Simulator, running_simulator

PASSWORD = "hunter2-secret"
QUICK = RetryPolicy(max_attempts=3, base_seconds=0, budget_seconds=5)
_ids = count(1)


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    with running_simulator(tmp_path_factory.mktemp("vault")) as running:
        yield running


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client() as client:
        yield client


@pytest.fixture
def vault(simulator: Simulator) -> str:
    name = f"80{next(_ids):04d}"
    simulator.add(name, rows=3)
    simulator.do(name, "publish", windows=2)
    return name


@pytest.fixture
def client(simulator: Simulator, vault: str, http: httpx.Client) -> VaultClient:
    login = Login("u@example.com", SecretStr(PASSWORD))
    return VaultClient(vault, simulator.address(vault), login, http, retry=QUICK)


def _first(client: VaultClient) -> Published:
    return read_listing(client.vault, client.list_files(WindowKind.INCREMENTAL)).published[0]


def test_one_login_serves_many_calls(simulator: Simulator, client: VaultClient, vault: str, tmp_path: Path):
    """Guards the limit that the vendor has for logins alone."""
    simulator.do(vault, "knobs", burst_limit=12)
    for _ in range(3):
        part = _first(client).parts[0]
        client.download(part, tmp_path / "part")
    assert (tmp_path / "part").stat().st_size == part.size


def test_a_session_that_ends_is_renewed_in_the_middle_of_the_work(
    simulator: Simulator, client: VaultClient, vault: str, tmp_path: Path
):
    part = _first(client).parts[0]
    simulator.do(vault, "knobs", session_calls=1)
    assert client.download(part, tmp_path / "part").md5 == part.md5
    assert client.download(part, tmp_path / "part").md5 == part.md5


def test_a_login_that_opens_another_vault_reads_nothing(simulator: Simulator, client: VaultClient, vault: str):
    """Guards against loading one customer's data into another's tables."""
    simulator.add(f"{vault}9", rows=1)
    simulator.do(vault, "knobs", wrong_vault=f"{vault}9")
    with pytest.raises(WrongVault, match=f"opened vault {vault}9"):
        client.list_files(WindowKind.INCREMENTAL)


@pytest.mark.parametrize("knob", ["fail_next", "http_error_next"])
def test_a_short_failure_of_the_vendor_is_tried_again(simulator: Simulator, client: VaultClient, vault: str, knob: str):
    simulator.do(vault, "knobs", **{knob: 2})
    assert len(client.list_files(WindowKind.INCREMENTAL)) == 2
    simulator.do(vault, "knobs", **{knob: 3})
    with pytest.raises(Transient):
        client.list_files(WindowKind.INCREMENTAL)


def test_a_download_that_breaks_off_is_fetched_again_from_the_start(
    simulator: Simulator, client: VaultClient, vault: str, tmp_path: Path
):
    simulator.do(vault, "knobs", cut_next=2)
    part = _first(client).parts[0]
    assert client.download(part, tmp_path / "part").md5 == part.md5
    assert (tmp_path / "part").stat().st_size == part.size


@pytest.mark.parametrize(("kind", "words"), [("wrong_md5", "MD5"), ("wrong_size", "bytes are listed")])
def test_a_part_that_is_not_what_was_listed_is_refused(
    simulator: Simulator, client: VaultClient, vault: str, tmp_path: Path, kind: str, words: str
):
    simulator.do(vault, "fault", stop="202601010015", kind=kind)
    part = _first(client).parts[0]
    with pytest.raises(Transient, match=f"{part.name}: .*{words}"):
        client.download(part, tmp_path / "part")


def test_json_in_place_of_a_part_is_an_error_and_never_a_file(
    simulator: Simulator, client: VaultClient, vault: str, tmp_path: Path
):
    """Guards the archive from a FAILURE that arrives with HTTP 200."""
    simulator.do(vault, "fault", stop="202601010015", kind="json_body")
    part = _first(client).parts[0]
    with pytest.raises(Transient, match="UNEXPECTED_ERROR"):
        client.download(part, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_file_that_is_gone_is_not_asked_for_again(client: VaultClient, tmp_path: Path):
    part = _first(client).parts[0]
    lost = type(part)(part.name.replace("0015", "2315"), 1, part.size, part.md5)
    with pytest.raises(Terminal, match="INVALID_DATA"):
        client.download(lost, tmp_path / "part")


def test_a_locked_user_is_a_matter_of_configuration(simulator: Simulator, client: VaultClient, vault: str):
    """Guards the account: trying again is what locks it for longer."""
    simulator.do(vault, "knobs", locked_out=True)
    with pytest.raises(InvalidInput, match="USER_LOCKED_OUT") as refusal:
        client.list_files(WindowKind.INCREMENTAL)
    assert PASSWORD not in f"{refusal.value!r} {refusal.value} {vars(client)}"


def test_the_last_calls_of_a_burst_are_left_to_others(simulator: Simulator, vault: str, http: httpx.Client):
    """Guards the vault's users: the limit is shared, and beyond it everyone is refused."""
    clock = FakeClock()
    login = Login("u", SecretStr("p"))
    client = VaultClient(vault, simulator.address(vault), login, http, clock=clock, retry=QUICK)
    simulator.do(vault, "knobs", burst_limit=20)
    with pytest.raises(BurstSpent):
        for _ in range(20):
            client.list_files(WindowKind.INCREMENTAL)
    simulator.do(vault, "knobs", burst_limit=2000)
    with pytest.raises(BurstSpent):
        client.list_files(WindowKind.INCREMENTAL)
    clock.advance(301)
    assert client.list_files(WindowKind.INCREMENTAL)


def test_a_vault_that_is_still_being_prepared_is_not_an_error_for_ever(
    simulator: Simulator, client: VaultClient, vault: str
):
    simulator.do(vault, "knobs", initial=True)
    with pytest.raises(Transient, match="Initial file being generated"):
        client.list_files(WindowKind.INCREMENTAL)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:1/\x00"])
def test_a_vault_that_cannot_be_reached_is_said_so(http: httpx.Client, url: str):
    client = VaultClient("v", url, Login("u", SecretStr("p")), http, retry=QUICK)
    with pytest.raises((Transient, InvalidInput), match="vault v"):
        client.list_files(WindowKind.INCREMENTAL)


def test_an_address_that_is_no_vault_is_a_matter_of_configuration(simulator: Simulator, http: httpx.Client):
    client = VaultClient("v", simulator.url + "/nowhere", Login("u", SecretStr("p")), http, retry=QUICK)
    with pytest.raises(InvalidInput, match="HTTP 404"):
        client.list_files(WindowKind.INCREMENTAL)


def test_a_login_comes_from_the_vaults_own_variables_or_the_common_ones():
    own = {"LOCKSTEP_VAULT_MY_VAULT_USER": "own", "LOCKSTEP_VAULT_MY_VAULT_PASSWORD": "a"}
    common = {"LOCKSTEP_VAULT_USER": "all", "LOCKSTEP_VAULT_PASSWORD": "b"}
    assert login_of("my-vault", own | common).user == "own"
    assert login_of("other", own | common).user == "all"
    with pytest.raises(InvalidInput, match="LOCKSTEP_VAULT_OTHER_USER and LOCKSTEP_VAULT_OTHER_PASSWORD"):
        login_of("other", own)


@pytest.mark.parametrize(
    "url", ["ftp://x", "myvault.com", "https://u:p@vault.example.com", "https://v.example.com/?a=1"]
)
def test_an_address_that_would_put_a_login_into_logs_is_refused(url: str):
    with pytest.raises(InvalidInput) as refusal:
        check_url(url)
    assert "u:p" not in str(refusal.value)
