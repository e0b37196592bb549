"""Rank 0's store listens where ranks were told to meet, and nowhere else."""

import os
import socket
from dataclasses import replace

import pytest

from tests.lib.ports import free_port
from tpdet.comm.world.distributed import open_store
from tpdet.comm.world.store_listener import store_listener
from tpdet.errors import ResourceError
from tpdet.launch.host.listeners import listeners
from tpdet.launch.ranks.environment import RankEnvironment

TWO_HOSTS = RankEnvironment(0, 2, 0, 1, launched=True, launcher="Slurm")


def addresses_of(port):
    return {found.address for found in listeners(os.getpid()) if found.port == port}


def answers(address, port):
    with socket.socket() as one:
        one.settimeout(2)
        return one.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.1"])
def test_on_several_hosts_it_is_the_given_address_alone(address):
    port = free_port()
    store, hosts = open_store(replace(TWO_HOSTS, address=address, port=port), (), 5.0)
    assert hosts and addresses_of(port) == {address}
    other = {"127.0.0.1": "127.0.0.2", "127.0.0.2": "127.0.0.1"}[address]
    assert answers(address, port) and not answers(other, port)
    there = replace(TWO_HOSTS, rank=1, address=address, port=port)
    client, hosts = open_store(there, (), 5.0)
    client.set("from", "the other host")
    assert not hosts and store.get("from") == b"the other host"


@pytest.mark.parametrize("address", ["localhost", "192.0.2.1", "no-such-host.invalid"])
def test_a_name_of_the_loopback_and_an_address_elsewhere_are_said_and_listen_everywhere(
    address, caplog
):
    assert store_listener(address, free_port()) is None
    (record,) = caplog.records
    assert f"MASTER_ADDR {address} is no address of rank 0's host" in record.getMessage()
    assert "listens on every address" in record.getMessage()


def test_a_port_that_is_taken_is_refused_with_the_remedy():
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"listen at 127.0.0.2:{port}.*set MASTER_PORT"):
            open_store(replace(TWO_HOSTS, address="127.0.0.2", port=port), (), 5.0)
