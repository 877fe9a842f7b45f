#!/usr/bin/env bash
# Two connected network namespaces, 10.77.0.1 and 10.77.0.2 on their eth0, until standard input ends.
#
# Prints their names. This machine's name resolves to 127.0.1.1 in both, as Debian has it; node0 is the first, where it does
# so too. Needs root and Debian's package iproute2.
set -euo pipefail

first=host$$-1 second=host$$-2
finish() {
    for name in "$first" "$second"; do
        ip netns del "$name" || true
        rm -rf "/etc/netns/$name"
    done
}
trap finish EXIT

for name in "$first" "$second"; do
    ip netns add "$name"
    ip -n "$name" link set lo up
    mkdir -p "/etc/netns/$name" # its hosts file is in place of /etc/hosts
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"/etc/netns/$name/hosts"
done
echo "127.0.1.1 node0" >>"/etc/netns/$first/hosts"
echo "10.77.0.1 node0" >>"/etc/netns/$second/hosts"
ip -n "$first" link add eth0 type veth peer name eth0 netns "$second"
ip -n "$first" address add 10.77.0.1/24 dev eth0
ip -n "$second" address add 10.77.0.2/24 dev eth0
ip -n "$first" link set eth0 up
ip -n "$second" link set eth0 up
echo "$first $second"
cat >/dev/null
