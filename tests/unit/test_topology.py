"""A compose file read for running it without containers: what is understood, and what is refused with its line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import dns.message
import dns.rcode
import msgspec
import pytest

from extproc import config, topology
from extproc.topology import TopologyError
from extproc.topology_env import VariableError, parse_env, replaced
from extproc.topology_names import NameServer
from extproc.topology_site import Site, filter_config, prometheus_config

# --- variables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A and ${A}", "one and one"),
        ("${NONE}", ""),
        ("${NONE:-x y}", "x y"),
        ("${NONE-x}", "x"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+set}${EMPTY:+set}${EMPTY+here}", "sethere"),
        ("${A:?why}", "one"),
        ("$$A costs $$1", "$A costs $1"),
    ],
)
def test_variables_are_replaced_as_compose_does(text: str, value: str) -> None:
    assert replaced(text, {"A": "one", "EMPTY": ""}) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${NONE:?a model}", "NONE is needed: a model"),
        ("${EMPTY:?}", "EMPTY is needed"),
        ("costs $1", "written $$"),
        ("${", "$$"),
    ],
)
def test_a_variable_that_cannot_be_replaced_is_an_error(text: str, why: str) -> None:
    with pytest.raises(VariableError) as caught:
        replaced(text, {"EMPTY": ""})
    assert why in str(caught.value)


def test_an_env_file_has_comments_quotes_and_empty_values() -> None:
    text = "# words\n\nA=one # not this\nexport B='two # this'\nC=\"x y\"\nD=\nE=a#b\n"
    assert parse_env(text, source=".env") == {"A": "one", "B": "two # this", "C": "x y", "D": "", "E": "a#b"}


@pytest.mark.parametrize(("text", "line"), [("A=1\nwords\n", 2), ("A='open\n", 1)])
def test_a_faulty_env_file_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(VariableError, match=rf"^\.env:{line}: "):
        parse_env(text, source=".env")


# --- the file ---------------------------------------------------------------------------------------------------------

SMALL = """
    x-common: &common
      image: thing:1
      command: [run, "--port=${PORT:-80}"]
    services:
      one:
        <<: *common
        profiles: [a]
        healthcheck: {test: [CMD, ask], interval: 1m30s, retries: 2}
      two:
        image: other:1
        depends_on:
          one: {condition: service_healthy, required: false}
        networks:
          inner: {aliases: [twin]}
    networks:
      inner: {ipam: {config: [{subnet: 10.9.0.0/16}]}}
"""


def parsed(text: str, **env: str) -> topology.ComposeFile:
    return topology.parse(textwrap.dedent(text).lstrip("\n"), env, source="compose.yaml")


def test_anchors_variables_and_defaults_are_in_what_comes_out() -> None:
    file = parsed(SMALL, PORT="81")
    one, two = file.services["one"], file.services["two"]
    assert one.command == ["run", "--port=81"]
    assert one.healthcheck is not None
    assert one.healthcheck.argv == ["ask"]
    assert topology.seconds(one.healthcheck.interval) == 90
    assert two.aliases == {"twin"}
    assert file.subnets == ["10.9.0.0/16"]


def test_a_service_of_another_profile_need_not_be_there_unless_it_is_required() -> None:
    file = parsed(SMALL)
    assert list(topology.in_use(file, [])) == ["two"]
    assert list(topology.in_use(file, ["a"])) == ["one", "two"]
    with pytest.raises(TopologyError, match=r"services\.two\.depends_on\.one: not in the profiles in use"):
        topology.in_use(parsed(SMALL.replace("required: false", "required: true")), [])
    with pytest.raises(TopologyError, match="there is no profile b; there are a"):
        topology.in_use(file, ["b"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("retries: 2", "retry: 2", "compose.yaml:8: services.one.healthcheck.retry: unknown field; did you mean retries?"),
        ("interval: 1m30s", "interval: soon", "compose.yaml:8: services.one.healthcheck.interval: 'soon' is not a duration"),
        ("[CMD, ask]", "[ask]", "compose.yaml:8: services.one.healthcheck.test: a list begins with CMD"),
        ("image: other:1", "imagee: other:1", "compose.yaml:10: services.two.imagee: unknown field; did you mean image?"),
        ("one: {cond", "three: {cond", "compose.yaml:12: services.two.depends_on.three: there is no such service"),
        ("condition: service_healthy", "condition: healthy", "compose.yaml:12: services.two.depends_on.one.condition: "),
        ("inner: {aliases", "outer: {aliases", "compose.yaml:13: services.two.networks: outer is not one of the networks"),
        ("image: other:1", "secrets: [key]", "compose.yaml:10: services.two.secrets: key is not one of the secrets"),
        ("image: other:1", "volumes: [data]", "compose.yaml:10: services.two.volumes: 'data' is not source:target"),
        ("image: other:1", "volumes: ['data:/d']", "compose.yaml:10: services.two.volumes: data is neither a path"),
        (
            "image: other:1",
            "command: ['${X:?model}']",
            "compose.yaml:10: services.two.command[0]: the variable X is needed",
        ),
        ("image: other:1", "stop_grace_period: 5", "compose.yaml:10: services.two.stop_grace_period: Expected str"),
        ("image: other:1", "deploy: {replicas: 2}", "compose.yaml:10: services.two.deploy.replicas: unknown field"),
    ],
)
def test_what_is_not_understood_is_refused_with_file_line_and_field(before: str, after: str, message: str) -> None:
    assert before in SMALL
    with pytest.raises(TopologyError) as caught:
        parsed(SMALL.replace(before, after, 1))
    assert str(caught.value).startswith(message)


def test_a_circle_and_a_missing_health_check_are_refused() -> None:
    circle = SMALL.replace("profiles: [a]", "depends_on: {two: {}}")
    with pytest.raises(TopologyError, match="in a circle: one -> two -> one"):
        topology.in_use(parsed(circle), [])
    unchecked = SMALL.replace("healthcheck: {test: [CMD, ask], interval: 1m30s, retries: 2}", "restart: always")
    with pytest.raises(TopologyError, match=r"services\.two\.depends_on\.one: it has no healthcheck"):
        topology.in_use(parsed(unchecked), ["a"])


def test_the_entrypoint_is_that_of_the_stage_or_of_what_it_is_made_from() -> None:
    dockerfile = 'FROM a AS base\nENTRYPOINT ["one"]\nFROM --platform=x base AS next\nFROM b AS last\nENTRYPOINT ["two", "x"]\n'
    assert topology.entrypoint_of(dockerfile, "next") == ["one"]
    assert topology.entrypoint_of(dockerfile, None) == ["two", "x"]
    with pytest.raises(ValueError, match="no stage other"):
        topology.entrypoint_of(dockerfile, "other")


# --- addresses and paths ----------------------------------------------------------------------------------------------

SITE = Site(
    "127.70.1.5",
    {"filter": "127.70.1.2", "prefill": "127.70.1.3", "prefill-cpu": "127.70.1.4"},
    [("/etc/baton", "/run/x/etc"), ("/etc/baton/baton.yaml", "/run/x/baton.yaml"), ("/models", "/run/x/models")],
    ["172.31.240.0/24"],
)


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("0.0.0.0:8000", "127.70.1.5:8000"),
        ("http://127.0.0.1:9003/healthz", "http://127.70.1.5:9003/healthz"),
        ("exec 3<>/dev/tcp/localhost/9901", "exec 3<>/dev/tcp/127.70.1.5/9901"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("filter:9002", "127.70.1.2:9002"),
        ("tcp://prefill-cpu:5555,prefill:1", "tcp://127.70.1.4:5555,127.70.1.3:1"),
        ("--role=prefill", "--role=prefill"),
        ("my-filter:80", "my-filter:80"),
        ("filter", "filter"),
        ("172.31.240.0/24", "127.70.1.5/32"),
        ("--config=/etc/baton/baton.yaml", "--config=/run/x/baton.yaml"),
        ("/etc/baton/other.yaml", "/run/x/etc/other.yaml"),
        ("/etc/baton-envoy/e.yaml", "/etc/baton-envoy/e.yaml"),
        ("/srv/models", "/srv/models"),
    ],
)
def test_addresses_and_paths_of_a_container_become_those_of_this_machine(text: str, here: str) -> None:
    assert SITE.text(text) == here


def test_the_filter_s_configuration_keeps_everything_but_addresses() -> None:
    compose = Path(__file__).parents[2] / "compose" / "baton.yaml"
    before = config.load(compose)
    envoy = Site("127.70.1.9", {}, [])
    after = filter_config(before, filter_=SITE, envoy=envoy, name_server="127.70.1.1:53")
    assert (after.listen, after.admin) == ("127.70.1.2:9002", "127.70.1.5:9003")
    assert (after.envoy.listen, after.envoy.admin) == ("127.70.1.9:8000", "127.70.1.9:9901")
    assert after.workers.dns_servers == ["127.70.1.1:53"]
    assert after.workers.dns == before.workers.dns
    assert after.epp.enabled == before.epp.enabled
    same = {"listen", "admin", "envoy", "epp", "workers", "drain", "cache_servers"}
    plain = [{key: value for key, value in msgspec.to_builtins(each).items() if key not in same} for each in (before, after)]
    assert plain[0] == plain[1]


def test_prometheus_gets_addresses_in_place_of_names() -> None:
    tree = {
        "scrape_configs": [
            {"job_name": "filter", "static_configs": [{"targets": ["filter:9003"]}]},
            {"job_name": "decode", "dns_sd_configs": [{"names": ["d", "none"], "type": "A", "port": 8100}]},
        ]
    }
    found = prometheus_config(tree, SITE, {"d": ["127.70.1.7", "127.70.1.8"]})["scrape_configs"]
    assert found[0]["static_configs"] == [{"targets": ["127.70.1.2:9003"]}]
    assert found[1] == {"job_name": "decode", "static_configs": [{"targets": ["127.70.1.7:8100", "127.70.1.8:8100"]}]}
    with pytest.raises(ValueError, match="job x: dns_sd_configs other than of type A"):
        prometheus_config({"scrape_configs": [{"job_name": "x", "dns_sd_configs": [{"names": ["d"]}]}]}, SITE, {})


def test_the_name_server_knows_what_runs_and_says_so_of_what_does_not() -> None:
    names: dict[str, list[str]] = {"decode-workers": ["127.70.1.7", "127.70.1.8"], "later": []}
    with NameServer("127.0.0.1", names) as server:

        def ask(name: str, kind: str = "A") -> tuple[str, list[str]]:
            reply = dns.message.from_wire(server.answer(dns.message.make_query(name, kind).to_wire()))
            return dns.rcode.to_text(reply.rcode()), sorted(str(record) for rrset in reply.answer for record in rrset)

        assert ask("Decode-Workers.") == ("NOERROR", ["127.70.1.7", "127.70.1.8"])
        assert ask("decode-workers.", "AAAA") == ("NOERROR", [])
        assert ask("later.") == ("NOERROR", [])
        assert ask("nobody.") == ("NXDOMAIN", [])
        names["later"].append("127.70.1.9")
        assert ask("later.") == ("NOERROR", ["127.70.1.9"])
