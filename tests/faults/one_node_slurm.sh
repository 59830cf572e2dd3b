#!/usr/bin/env bash
# A Slurm of one node on this machine, for trying launcher=slurm. Needs root and: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
#
#   tests/faults/one_node_slurm.sh start     then e.g.  python -m stability.sweep launcher=slurm slurm.minutes=10
#   tests/faults/one_node_slurm.sh stop
#
# State and logs lie in /tmp/one-node-slurm. Written for Debian 12 (Slurm 22.05); no accounting and no cgroups, so that it runs in a container.
set -euo pipefail
home=/tmp/one-node-slurm
export SLURM_CONF=/etc/slurm/slurm.conf

stop() {
    for name in slurmd slurmctld munged; do
        if [ -f "$home/$name.pid" ]; then
            kill "$(cat "$home/$name.pid")" 2>/dev/null || true
        fi
    done
}

start() {
    [ "$(id -u)" = 0 ] || { echo "run this as root: munge and slurmd change users" >&2; exit 2; }
    for tool in munged slurmctld slurmd sbatch; do
        command -v "$tool" >/dev/null || { echo "no $tool here; see the first lines of $0" >&2; exit 2; }
    done
    mkdir -p "$home"/{ctld,d,munge} /etc/slurm /run/munge
    chown -R munge: "$home/munge" /run/munge
    [ -f /etc/munge/munge.key ] || { install -d -o munge -m 700 /etc/munge; head -c 1024 /dev/urandom >/etc/munge/munge.key; }
    chown munge: /etc/munge /etc/munge/munge.key
    chmod 400 /etc/munge/munge.key
    # /tmp is world-writable, which munged refuses for its own files unless forced
    setpriv --reuid munge --regid munge --clear-groups munged --force --pid-file "$home/munge/munged.pid" --log-file "$home/munge/munged.log" \
        --seed-file "$home/munge/seed"
    ln -sf munge/munged.pid "$home/munged.pid"
    configure
    slurmctld -c -L "$home/slurmctld.log"
    slurmd -c -L "$home/slurmd.log"
    for _ in $(seq 30); do
        [ "$(sinfo --noheader --format=%t 2>/dev/null)" = idle ] && { sinfo; return; }
        sleep 1
    done
    echo "the node did not become idle; see $home/*.log" >&2
    exit 1
}

configure() {
    host=$(hostname -s)
    cat >"$SLURM_CONF" <<EOF
ClusterName=one
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$home/ctld
SlurmdSpoolDir=$home/d
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=sched_interval=1
MailProg=/bin/true
NodeName=$host CPUs=$(nproc) RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
EOF
}

case "${1:-}" in
start) start ;;
stop) stop ;;
*) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
