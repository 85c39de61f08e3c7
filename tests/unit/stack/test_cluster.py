"""Spark as a cluster: which parts there are, what they are told, and the `java` that executors start with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.kernel.errors import InvalidInput
from lockstep.kernel.settings import load_settings
from stack import cluster, java, parts
from stack.environment import environment
from stack.home import Home
from stack.lifecycle import Stack


@pytest.fixture
def site(home_folder: Path) -> parts.Site:
    settings = load_settings(home=home_folder / "a home with spaces")
    home = Home(settings.home)
    home.prepare()
    ports = home.choose_ports(settings)
    return parts.Site(settings, home, ports, environment(settings, home, ports), clustered=True)


def test_the_connect_server_waits_for_the_master_and_both_workers():
    names = [part.name for part in parts.select(["spark"], load_settings(), parts.all_parts(clustered=True))]
    assert names == ["spark-master", "spark-worker-1", "spark-worker-2", "spark"]


def test_without_the_flag_there_is_no_part_of_a_cluster():
    assert parts.all_parts(clustered=False) == parts.PARTS
    with pytest.raises(InvalidInput, match="unknown part: spark-master"):
        parts.select(["spark-master"], load_settings())


def test_the_server_is_told_of_the_master_only_on_a_cluster(site: parts.Site):
    assert parts.spark_configuration(site)["spark.master"] == f"spark://127.0.0.1:{site.ports['spark_master']}"
    plain = parts.Site(site.settings, site.home, site.ports, site.environment)
    assert parts.spark_configuration(plain)["spark.master"] == "local[4]"


def test_options_of_the_user_win_and_what_is_none_is_refused(site: parts.Site):
    settings = load_settings(home=site.home.root, spark_options="spark.master=local[1] spark.some.pair=a=b")
    found = parts.spark_configuration(parts.Site(settings, site.home, site.ports, site.environment))
    assert (found["spark.master"], found["spark.some.pair"]) == ("local[1]", "a=b")
    for bad in ("shuffle=1", "spark.alone", "spark.a=1  spark.b=2"):
        with pytest.raises(InvalidInput, match="LOCKSTEP_SPARK_OPTIONS"):
            load_settings(spark_options=bad)


def test_master_and_workers_listen_on_loopback_and_carry_no_secret(site: parts.Site):
    made = site.home.credentials()
    for part in parts.CLUSTER_PARTS:
        words = part.command(site)
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert part.environment(site)["SPARK_LOCAL_IP"] == "127.0.0.1", "Spark's web pages listen where this says"
        assert not any(secret in " ".join(words) for name, secret in made.items() if name != "aws_access_key_id")


def test_executors_start_without_the_module_that_the_runtime_lacks(site: parts.Site, monkeypatch: pytest.MonkeyPatch):
    """Guards executors that die at once, for ever: Spark's launcher adds a module that is not in the wheel's Java."""
    monkeypatch.setattr(java, "java", lambda: "/bin/echo")
    cluster.prepare_worker(site, 1)
    program = Path(cluster.worker_environment(site)["JAVA_HOME"]) / "bin" / "java"
    given = [
        "-cp",
        "/conf:/jars/*",
        "-Xmx1g",
        "--add-modules=jdk.incubator.vector",
        "-Dname=two words",
        "a.Main",
        "--x",
    ]
    told = subprocess.run([str(program), *given], capture_output=True, text=True, check=True).stdout
    assert "incubator" not in told
    assert "/jars/*" not in told
    assert told.rstrip().endswith("-Xmx1g -Dname=two words a.Main --x")
    assert "delta-spark" in told, "the jars of Delta are on the class path of executors"


def test_a_running_stack_does_not_become_a_cluster(home_folder: Path):
    stack = Stack(load_settings(home=home_folder / "home"))
    stack.home.prepare()
    with pytest.raises(InvalidInput, match="lockstep down"):
        stack._decide_cluster(True, fresh=False)
    stack._decide_cluster(True, fresh=True)
    assert stack.home.clustered
    stack._decide_cluster(False, fresh=False)
    assert stack.home.clustered, "what was decided at the start holds until `down`"
    stack._decide_cluster(False, fresh=True)
    assert not stack.home.clustered


def test_a_cluster_is_refused_where_spark_is_a_service_of_the_user(home_folder: Path):
    stack = Stack(load_settings(home=home_folder / "home", spark_remote="sc://spark.example.com:15002"))
    with pytest.raises(InvalidInput, match="LOCKSTEP_SPARK_REMOTE"):
        stack._decide_cluster(True, fresh=True)
