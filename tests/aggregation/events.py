"""Simulates event by event who comes back when. It shares only the keyed draws with the package."""

import math

from fl_lightning.utils.keyed import keyed_numpy


class Client:
    """Holds one client: its device and its job."""

    def __init__(self, ident, device):
        self.ident = ident
        self.device = device
        self.job = None
        self.waits = False

    def takes(self, world, version, repeat):
        """Return the fixed seconds, the seconds of training and the batches of a job."""
        device = self.device
        batches, samples = world["work"](self.ident, version)
        training = batches * device["step_seconds"] + samples * device.get("sample_seconds", 0.0)
        if device.get("jitter"):
            z = self._draws(world, "jitter", version, repeat=repeat).standard_normal()
            training *= math.exp(device["jitter"] * z)
        fixed = device.get("latency", 0.0)
        fixed += world["down"] * 8 / (device.get("down_mbps", math.inf) * 1e6)
        fixed += world["up"] * 8 / (device.get("up_mbps", math.inf) * 1e6)
        return fixed, training, batches

    def breaks(self, world, version, repeat):
        """Return the share of a job after which it is lost, or None."""
        rate = self.device.get("dropout", 0.0)
        if not rate:
            return None
        lost, share = self._draws(world, "dropout", version, repeat=repeat).random(2)
        return share if lost < rate else None

    def _draws(self, world, purpose, version, *, repeat):
        tail = f"/{repeat}" if repeat else ""
        return keyed_numpy(
            seed=world["seed"],
            purpose=f"clock/{purpose}{tail}",
            round_idx=version,
            client_id=self.ident,
        )


class Buffered:
    """Simulates rounds of a buffer. It looks through all clients for each event."""

    def __init__(self, world, *, slots, buffer, timeout, max_staleness):
        self.world = world
        self.slots = slots
        self.buffer = buffer
        self.timeout = timeout
        self.max_staleness = max_staleness
        self.clients = [Client(ident, device) for ident, device in enumerate(world["devices"])]
        self.now = 0.0
        self.version = 0
        self.starts = []

    def fill(self):
        """Start clients until all slots are taken or no client is idle."""
        while True:
            at_work = [client for client in self.clients if client.job]
            idle = [client for client in self.clients if not client.job and not client.waits]
            if len(at_work) >= self.slots or not idle:
                return
            count = len(self.starts)
            place = keyed_numpy(self.world["seed"], "clock/start", count).integers(len(idle))
            self.start(idle[place])

    def start(self, client):
        """Give a client a job: (end, number, version, fate)."""
        earlier = [start for start in self.starts if start[:2] == (client.ident, self.version)]
        repeat = len(earlier)
        fixed, training, _ = client.takes(self.world, self.version, repeat)
        length = fixed + training
        fate = "back"
        share = client.breaks(self.world, self.version, repeat)
        if share is not None:
            length *= share
            fate = "lost"
        if self.timeout is not None and (fate == "lost" or length > self.timeout):
            length = self.timeout
            fate = "lost"
        client.job = (self.now + length, len(self.starts), self.version, fate)
        self.starts.append((client.ident, self.version, self.now))

    def round(self):
        """Return the arrivals, the seconds and the number of lost jobs until the buffer is full."""
        arrivals = []
        lost = 0
        while len(arrivals) < self.buffer:
            at_work = [client for client in self.clients if client.job]
            nearest = min(at_work, key=lambda client: client.job[:2])
            self.now, _, since, fate = nearest.job
            nearest.job = None
            too_old = self.max_staleness is not None and self.version - since > self.max_staleness
            if fate == "lost" or too_old:
                lost += 1
            else:
                arrivals.append((nearest.ident, since))
                nearest.waits = True
            if len(arrivals) == self.buffer:
                self.version += 1
                for client in self.clients:
                    client.waits = False
            self.fill()
        return {"arrivals": arrivals, "seconds": self.now, "lost": lost}


def buffered(world, *, slots, buffer, timeout, max_staleness, rounds):
    """Return the rounds of a buffer as dicts of arrivals, seconds and lost, and the starts."""
    simulation = Buffered(world, slots=slots, buffer=buffer, timeout=timeout, max_staleness=max_staleness)
    simulation.fill()
    happened = [simulation.round() for _ in range(rounds)]
    return happened, simulation.starts


def synchronous(world, *, asked, size, deadline, late, rounds):
    """Return rounds one after the other, as dicts with the batches that each client makes."""
    clients = [Client(ident, device) for ident, device in enumerate(world["devices"])]
    now = 0.0
    happened = []
    for version in range(rounds):
        people = asked(version)
        lengths = []
        back = []
        for ident in people:
            length, batches = in_round(clients[ident], world, version, deadline=deadline, late=late)
            lengths.append(length)
            if batches is not None:
                back.append((length, ident, batches))
        enough = size or len(people)
        back = sorted(back)[:enough]
        if len(back) in (enough, len(people)):
            now += max((length for length, _, _ in back), default=0.0)
        elif deadline is None:
            now += max(lengths)
        else:
            now += deadline
        happened.append(
            {
                "arrivals": sorted((ident, version) for _, ident, _ in back),
                "batches": {ident: batches for _, ident, batches in back},
                "seconds": now,
                "lost": len(people) - len(back),
            }
        )
    return happened


def in_round(client, world, version, *, deadline, late):
    """Return the seconds of a client's job and its batches, or None if it does not come back."""
    fixed, training, batches = client.takes(world, version, 0)
    length = fixed + training
    if deadline is not None and length > deadline:
        made = math.floor((deadline - fixed) / training * batches) if training else 0
        if late == "cut" and made >= 1:
            length = fixed + made / batches * training
            batches = made
        else:
            batches = None
    share = client.breaks(world, version, 0)
    if share is not None:
        length *= share
        batches = None
    return length, batches
