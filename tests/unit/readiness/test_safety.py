"""What configuration may not do, one named test for each way in: private addresses, a shell, the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.readiness import config
from lockstep.readiness.safety import Forbidden, GuardedTransport, guarded_client, is_public
from tests.unit.readiness.webserver import serving

PIPELINE = "name: p\narchetype: a\ntraits: {t: {}}\n"


def _load(folder: Path, text: str) -> Any:
    for kind, words in {"archetypes": "name: a\nrequiredTraits: [{type: t}]\n", "pipelines": text}.items():
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / "it.yaml").write_text(words)
    return config.load([folder])


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/",
        "http://[::1]:9/",
        "http://10.0.0.8/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:10.0.0.8]/",
        "http://localhost:9/",
        "http://2130706433/",
    ],
)
def test_ssrf_to_a_private_address_is_refused_before_any_connection(url: str):
    with guarded_client() as client, pytest.raises(Forbidden):
        client.post(url)


@pytest.mark.parametrize(
    "address",
    ["64:ff9b::a00:8", "2002:a00:8::1", "2001:0:a00:8::1", "fe80::1%eth0", "224.0.0.1", "0.0.0.1", "100.64.0.1"],
)
def test_ssrf_through_an_address_that_only_looks_public_is_refused(address: str):
    """Guards translated addresses: NAT64 and 6to4 carry a private IPv4 address inside a global IPv6 one."""
    assert not is_public(address)


def test_ssrf_by_redirect_is_not_followed():
    with serving(lambda _: (200, {"status": "PASS"})) as (inside, reached):
        with (
            serving(lambda _: (307, {}), Location=inside) as (outside, _),
            guarded_client(["127.0.0.1"]) as client,  # both are allowed: what is refused is to follow
        ):
            assert client.post(outside).status_code == 307
        assert reached == []


def test_ssrf_by_a_name_with_one_private_address_is_refused():
    transport = GuardedTransport(resolve=lambda *_: ["93.184.216.34", "10.0.0.8"])
    with pytest.raises(Forbidden):
        transport.handle_request(httpx.Request("POST", "http://two.example.com/"))


@pytest.mark.parametrize("program", ["sh", "/bin/sh", "bash", "/usr/bin/env", "busybox", "cmd.exe"])
def test_sh_c_is_refused_at_load(tmp_path: Path, program: str):
    with pytest.raises(InvalidInput, match="shell"):
        _load(tmp_path, f"{PIPELINE}trigger: {{type: command, command: ['{program}', '-c', 'id']}}\n")


@pytest.mark.parametrize("text", ["${AWS_SECRET_ACCESS_KEY}", "$HOME", "${date}${PATH}", "${unclosed"])
@pytest.mark.parametrize(
    "place",
    [
        "trigger: {{type: http, url: 'https://x.example.com', body: '{0}'}}",
        "trigger: {{type: http, url: 'https://x.example.com', headers: {{A: '{0}'}}}}",
        "trigger: {{type: glue, jobName: j, arguments: {{a: '{0}'}}}}",
        "trigger: {{type: command, command: ['/bin/true', '{0}']}}",
    ],
)
def test_environment_variables_are_refused_at_load_wherever_they_stand(tmp_path: Path, text: str, place: str):
    with pytest.raises(InvalidInput, match="not a template variable"):
        _load(tmp_path, PIPELINE + place.format(text) + "\n")


def test_our_own_variables_and_a_lone_dollar_are_understood(tmp_path: Path):
    trigger = "trigger: {type: http, url: 'https://x.example.com', body: 'for 5$ on ${date} ${scheduleID}'}\n"
    assert _load(tmp_path, PIPELINE + trigger).plan("p").trigger.options["body"].endswith("${scheduleID}")
