"""A simulation of who comes back when, event by event, which shares nothing with the package but the keyed draws."""

import math

from fl_lightning.utils.keyed import keyed_numpy


class Client:
    """One client: its device, and what it is at."""

    def __init__(self, ident, device):
        self.ident = ident
        self.device = device
        self.job = None
        self.waits = False

    def takes(self, world, version, repeat):
        """Fixed seconds, seconds of training and batches of a job."""
        device = self.device
        batches, samples = world["work"](self.ident, version)
        training = batches * device["step_seconds"] + samples * device.get("sample_seconds", 0.0)
        if device.get("jitter"):
            tail = f"/{repeat}" if repeat else ""
            z = keyed_numpy(world["seed"], "clock/jitter" + tail, version, self.ident).standard_normal()
            training *= math.exp(device["jitter"] * z)
        fixed = device.get("latency", 0.0)
        fixed += world["down"] * 8 / (device.get("down_mbps", math.inf) * 1e6)
        fixed += world["up"] * 8 / (device.get("up_mbps", math.inf) * 1e6)
        return fixed, training, batches

    def breaks(self, world, version, repeat):
        """The share of a job after which it is lost, or None."""
        rate = self.device.get("dropout", 0.0)
        if not rate:
            return None
        tail = f"/{repeat}" if repeat else ""
        lost, share = keyed_numpy(world["seed"], "clock/dropout" + tail, version, self.ident).random(2)
        return share if lost < rate else None


def buffered(world, *, slots, buffer, timeout, max_staleness, rounds):
    """Rounds of a buffer: dicts of arrivals, seconds, lost and starts. It looks through all clients for each event."""
    clients = [Client(ident, device) for ident, device in enumerate(world["devices"])]
    now, version, count = 0.0, 0, 0
    starts, happened = [], []

    def fill():
        nonlocal count
        while True:
            at_work = [client for client in clients if client.job]
            idle = [client for client in clients if not client.job and not client.waits]
            if len(at_work) >= slots or not idle:
                return
            chosen = idle[keyed_numpy(world["seed"], "clock/start", count).integers(len(idle))]
            repeat = sum(1 for start in starts if start[:2] == (chosen.ident, version))
            fixed, training, _ = chosen.takes(world, version, repeat)
            length, fate = fixed + training, "back"
            share = chosen.breaks(world, version, repeat)
            if share is not None:
                length, fate = length * share, "lost"
            if timeout is not None and (fate == "lost" or length > timeout):
                length, fate = timeout, "lost"
            chosen.job = (now + length, count, version, fate)
            starts.append((chosen.ident, version, now))
            count += 1

    fill()
    for _ in range(rounds):
        arrivals, lost = [], 0
        while len(arrivals) < buffer:
            nearest = min((client for client in clients if client.job), key=lambda client: client.job[:2])
            now, _, since, fate = nearest.job
            nearest.job = None
            too_old = max_staleness is not None and version - since > max_staleness
            if fate == "lost" or too_old:
                lost += 1
            else:
                arrivals.append((nearest.ident, since))
                nearest.waits = True
            if len(arrivals) == buffer:
                version += 1
                for client in clients:
                    client.waits = False
            fill()
        happened.append({"arrivals": arrivals, "seconds": now, "lost": lost})
    return happened, starts


def synchronous(world, *, asked, size, deadline, late, rounds):
    """Rounds one after the other, as dicts with the batches that each client makes."""
    clients = [Client(ident, device) for ident, device in enumerate(world["devices"])]
    now, happened = 0.0, []
    for version in range(rounds):
        known, back = [], []
        people = asked(version)
        for ident in people:
            fixed, training, batches = clients[ident].takes(world, version, 0)
            length, comes = fixed + training, True
            if deadline is not None and length > deadline:
                comes = False
                made = math.floor((deadline - fixed) / training * batches) if training else 0
                if late == "cut" and made >= 1:
                    length, batches, comes = fixed + made / batches * training, made, True
            share = clients[ident].breaks(world, version, 0)
            if share is not None:
                length, comes = length * share, False
            known.append(length)
            if comes:
                back.append((length, ident, batches))
        back = sorted(back)[: size or len(people)]
        full = len(back) == (size or len(people)) or len(back) == len(people)
        if full:
            length = max((one[0] for one in back), default=0.0)
        else:
            length = max(known) if deadline is None else deadline
        now += length
        happened.append(
            {
                "arrivals": sorted((ident, version) for _, ident, _ in back),
                "batches": {ident: batches for _, ident, batches in back},
                "seconds": now,
                "lost": len(people) - len(back),
            }
        )
    return happened
