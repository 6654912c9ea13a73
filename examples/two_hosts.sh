#!/usr/bin/env bash
# Runs a program on two hosts that are one machine, in one command:
#
#   sudo examples/two_hosts.sh examples/python/train_fsdp.py some_text.txt
#
# Each host is a namespace of networks and one of processes, so that ranks of different hosts cannot
# share memory; a virtual cable joins the two. What crosses it is printed at the end. On two real
# machines run the command that this script prints on each of them, without "ip netns exec ...".
#
# RANKS (2) is per host, PYTHON (python3) the interpreter, RATE (no limit) that of the cable, as tc
# writes it: 100mbit. Needs root, iproute2 and util-linux.
set -euo pipefail

ranks=${RANKS:-2}
python=${PYTHON:-python3}
prefix=trireme$$
[ $# -gt 0 ] || { echo "usage: $0 PROGRAM [ARGUMENTS]" >&2; exit 2; }

cleanup() {
  jobs -p | xargs -r kill 2> /dev/null || true
  ip netns delete "${prefix}h0" 2> /dev/null || true
  ip netns delete "${prefix}h1" 2> /dev/null || true # and the cable with it
}
trap cleanup EXIT

join_namespaces() {
  ip netns add "${prefix}h0"
  ip netns add "${prefix}h1"
  ip link add "tri$$a" type veth peer name "tri$$b"
  ip link set "tri$$a" netns "${prefix}h0" name trireme0
  ip link set "tri$$b" netns "${prefix}h1" name trireme0
  for host in 0 1; do
    ip -n "${prefix}h$host" addr add "10.78.0.$((host + 1))/24" dev trireme0
    ip -n "${prefix}h$host" link set trireme0 up
    ip -n "${prefix}h$host" link set lo up
    [ -z "${RATE:-}" ] || ip netns exec "${prefix}h$host" tc qdisc add dev trireme0 root \
      tbf rate "$RATE" burst 64kb latency 400ms
  done
}
join_namespaces || { echo "network namespaces are not possible here" >&2; exit 3; }

run_on() { # HOST COMMAND ...
  local host=$1
  shift
  [ "$host" = 0 ] && echo "on host 0 (on host 1 with --node-rank 1): $*"
  ip netns exec "${prefix}h$host" unshare --pid --fork --kill-child --mount-proc "$@"
}

torchrun_on() { # HOST PROGRAM ...
  local host=$1
  shift
  run_on "$host" env GLOO_SOCKET_IFNAME=trireme0 "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$host" \
    --nproc-per-node "$ranks" --master-addr 10.78.0.1 --master-port 29500 "$@"
}

torchrun_on 0 "$@" &
first=$!
status=0
torchrun_on 1 "$@" || status=$?
wait "$first" || status=$?

for host in 0 1; do
  sent=$(ip netns exec "${prefix}h$host" cat /sys/class/net/trireme0/statistics/tx_bytes)
  awk -v host="$host" -v sent="$sent" \
    'BEGIN { printf "host %d sent %.1f MiB\n", host, sent / 1048576 }'
done
exit "$status"
