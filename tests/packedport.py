"""A model in one packed sequence, text and given rows first, then speech, pictures and motion beat by beat: it predicts x0 and is told an angle.

What ports may have that our own do not: given rows before the clip's first time, adapters that are called neither lora_A nor lora_B, targets that are
not configurable, and a tensor-parallel worker that is nobody's but theirs. First the vendor's model and loop, then the worker, then the port.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import nn

from loudfail.harness.case import Case
from loudfail.harness.port import AdapterConfig, BindReport, Conditions, Port, RowTable, Step, Trajectory, find_trainer, probe

KINDS = ("text", "speech", "picture", "motion")
WIDTH = {"text": 8, "speech": 4, "picture": 8, "motion": 2}
HID, HEADS, INNER = 32, 4, 48


def when(angles, places):
    """What a row is told of its level and its place, ``(L, 6)``."""
    a, (time, index) = torch.nan_to_num(angles), places.T
    return torch.stack([a.sin(), a.cos(), time.sin(), time.cos(), index.sin(), angles.isnan().float()], 1)


def normalized(h):
    return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.merge = (nn.Linear(HID, HID, bias=False) for _ in range(4))
        self.gate, self.raise_, self.lower = nn.Linear(HID, INNER, bias=False), nn.Linear(HID, INNER, bias=False), nn.Linear(INNER, HID, bias=False)

    def forward(self, h):
        y = normalized(h)
        q, k, v = (f(y).view(len(y), HEADS, -1).transpose(0, 1) for f in (self.query, self.key, self.value))
        a = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
        h = h + self.merge(a.transpose(0, 1).reshape(len(y), HID))
        y = normalized(h)
        return h + self.lower(torch.tanh(self.gate(y)) * self.raise_(y))


class PackedModel(nn.Module):
    """Rows (L, 8), kinds (L,), places (L, 2), angles (L,) in radians, 0 data, pi/2 noise, NaN for text -> x0 (L, 8)."""

    def __init__(self):
        super().__init__()
        self.enter = nn.ModuleList(nn.Linear(WIDTH[k], HID) for k in KINDS)
        self.leave = nn.ModuleList(nn.Linear(HID, WIDTH[k]) for k in KINDS[1:])
        self.clock = nn.Linear(6, HID)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, rows, kinds, places, angles):
        h = torch.zeros(len(kinds), HID)
        for n, k in enumerate(KINDS):
            h = h.index_put(((kinds == n).nonzero()[:, 0],), self.enter[n](rows[kinds == n][:, : WIDTH[k]]))
        h = h + self.clock(when(angles, places))
        for block in self.blocks:
            h = block(h)
        out = torch.zeros(len(kinds), 8)
        for n, k in enumerate(KINDS[1:], 1):
            out = out.index_put(((kinds == n).nonzero()[:, 0],), nn.functional.pad(self.leave[n - 1](h[kinds == n]), (0, 8 - WIDTH[k])))
        return out


def levels(calls):
    u = torch.linspace(1, 0, calls + 1, dtype=torch.float64)
    return {"speech": u, "picture": 3 * u / (1 + 2 * u), "motion": 2 * u / (1 + u)}


def vendor_loop(model, rows, kinds, places, given, calls):
    grid = torch.stack([torch.full((calls + 1,), math.nan, dtype=torch.float64), *(levels(calls)[k] for k in KINDS[1:])])
    live = (kinds > 0) & ~given
    for i in range(calls):
        angles = (grid[:, i] * math.pi / 2)[kinds]
        angles[given] = 0.0
        x0 = model(rows, kinds, places, angles.float())
        s, t = grid[kinds, i][:, None], grid[kinds, i + 1][:, None]
        after = rows.clone()
        after[live] = (x0.double() + t / s * (rows.double() - x0.double())).float()[live]
        yield rows, after, grid[1:, i], grid[1:, i + 1]
        rows = after


class Pair(nn.Module):
    def __init__(self, out, inn, config):
        super().__init__()
        self.reduce, self.expand, self.scale = nn.Linear(inn, config.rank, bias=False), nn.Linear(config.rank, out, bias=False), config.scale
        nn.init.zeros_(self.expand.weight)

    def forward(self, x):
        return self.scale * self.expand(self.reduce(x))


class Tuned(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.pairs, self.use = inner, nn.ModuleDict(), None

    def forward(self, x):
        return self.inner(x) + (self.pairs[self.use](x) if self.use else 0)


TUNED = ("query", "key", "value", "merge", "gate", "raise_", "lower")


class Worker:
    """Ranks one after another; query, key, value fused, gate and raise fused; merge and lower row-parallel."""

    def __init__(self, degree):
        self.degree, self.shell = degree, PackedModel()
        self.parts, self.adapter = {}, {}

    def rows(self, w, r):
        return w.chunk(self.degree)[r]

    def cols(self, w, r):
        return w.chunk(self.degree, 1)[r]

    def load(self, state):
        self.shell.load_state_dict(state)
        self.parts = {}
        for b in ("blocks.0", "blocks.1"):
            for r in range(self.degree):
                self.parts[b, "qkv", r] = torch.cat([self.rows(state[f"{b}.{n}.weight"], r) for n in ("query", "key", "value")]).clone()
                self.parts[b, "gate_raise", r] = torch.cat([self.rows(state[f"{b}.{n}.weight"], r) for n in ("gate", "raise_")]).clone()
                self.parts[b, "merge", r] = self.cols(state[f"{b}.merge.weight"], r).clone()
                self.parts[b, "lower", r] = self.cols(state[f"{b}.lower.weight"], r).clone()

    def tune(self, tensors, scale):
        self.adapter = {}
        for name in {n.rsplit(".lora_", 1)[0] for n in tensors}:
            a, b = tensors[f"{name}.lora_A.weight"], scale * tensors[f"{name}.lora_B.weight"]
            for r in range(self.degree):
                wide = name.endswith(("merge", "lower"))
                self.adapter[name, r] = ((self.cols(a, r) if wide else a).clone(), (b if wide else self.rows(b, r)).clone())

    def delta(self, name, x, r):
        """x whole for column-parallel, the shard for row-parallel."""
        if (name, r) not in self.adapter:
            return None
        a, b = self.adapter[name, r]
        return x @ a.T @ b.T

    def fused(self, block, kind, names, x, r):
        y = list((x @ self.parts[block, kind, r].T).chunk(len(names), -1))
        for i, n in enumerate(names):
            if (d := self.delta(f"{block}.{n}", x, r)) is not None:
                y[i] = y[i] + d
        return y

    def row(self, block, name, shards):
        total = 0
        for r, x in enumerate(shards):
            y = x @ self.parts[block, name, r].T
            d = self.delta(f"{block}.{name}", x, r)
            total = total + (y if d is None else y + d)
        return total

    @torch.no_grad()
    def run(self, rows, kinds, places, angles):
        shell = self.shell
        h = torch.zeros(len(kinds), HID)
        for n, k in enumerate(KINDS):
            h[kinds == n] = shell.enter[n](rows[kinds == n][:, : WIDTH[k]])
        h = h + shell.clock(when(angles, places))
        for b in ("blocks.0", "blocks.1"):
            y = normalized(h)
            outs = []
            for r in range(self.degree):
                q, k, v = (z.view(len(y), HEADS // self.degree, -1).transpose(0, 1) for z in self.fused(b, "qkv", ("query", "key", "value"), y, r))
                o = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
                outs.append(o.transpose(0, 1).reshape(len(y), -1))
            h = h + self.row(b, "merge", outs)
            y = normalized(h)
            outs = []
            for r in range(self.degree):
                g, u = self.fused(b, "gate_raise", ("gate", "raise_"), y, r)
                outs.append(torch.tanh(g) * u)
            h = h + self.row(b, "lower", outs)
        out = torch.zeros(len(kinds), 8)
        for n, k in enumerate(KINDS[1:], 1):
            out[kinds == n] = nn.functional.pad(shell.leave[n - 1](h[kinds == n]), (0, 8 - WIDTH[k]))
        return out


class Engine:
    def __init__(self, port, degree):
        self.port, self.degree, self.worker, self.version = port, degree, Worker(degree), None
        self.worker.load(port.base_state())

    def load_base(self, state):
        self.worker.load(state)

    def base_response(self, count, seed):
        w, out = self.worker, {}
        for n, v in w.shell.state_dict().items():
            if v.ndim != 2:
                out[n] = v.clone()
                continue
            x = probe(v.shape[1], count, seed).T
            b, _, leaf = n.removesuffix(".weight").rpartition(".")
            for kind, names in (("qkv", ("query", "key", "value")), ("gate_raise", ("gate", "raise_"))):
                if leaf in names:
                    i = names.index(leaf)
                    v = torch.cat([w.parts[b, kind, r].chunk(len(names))[i] for r in range(self.degree)])
            if leaf in ("merge", "lower"):
                v = torch.cat([w.parts[b, leaf, r] for r in range(self.degree)], 1)
            out[n] = v @ x
        return out

    def set_adapter(self, state, config, version):
        if version == self.version:
            raise RuntimeError("version in use")
        self.worker.tune(state, config.scale)
        self.version = version
        return BindReport(version, len(state) // 2, len(self.worker.adapter) // self.degree)

    def remove_adapter(self):
        self.worker.tune({}, 1.0)
        self.version = None

    def adapter_version(self):
        return self.version

    def delta_response(self, count, seed):
        w, result = self.worker, {}
        for name in {n for n, _ in w.adapter}:
            wide = name.endswith(("merge", "lower"))
            if wide:
                inn = sum(w.adapter[name, r][0].shape[1] for r in range(self.degree))
                x = probe(inn, count, seed).chunk(self.degree, 1)
                result[name] = sum(w.delta(name, x[r], r) for r in range(self.degree)).T
            else:
                x = probe(w.adapter[name, 0][0].shape[1], count, seed)
                result[name] = torch.cat([w.delta(name, x, r) for r in range(self.degree)], 1).T
        return result

    def velocity(self, latents, sigmas, conditions):
        return self.port.ask(self.worker.run, latents, sigmas, conditions)

    def replicated(self, *call):
        return [self.velocity(*call)] * self.degree

    def grid(self, calls, case=None):
        return {m: g.float() for m, g in levels(calls).items()}

    def rollout(self, noise, calls, conditions):
        steps, x, grid = [], dict(noise), self.grid(calls)
        for i in range(calls):
            now = {m: g[i].repeat(len(conditions)) for m, g in grid.items()}
            v = self.velocity(x, now, conditions)
            after = {m: x[m] + (grid[m][i + 1] - grid[m][i]) * v[m] for m in x}
            steps.append(Step(x, now, v, after))
            x = after
        return Trajectory(steps)

    def classes(self):
        return ["packedport.Worker"]


class PackedPort(Port):
    name = "packed"
    modalities = ("speech", "picture", "motion")
    extents = {"beats": (2, 3), "tall": (2, 4), "wide": (2, 4)}
    givens = ((), ("still",))
    adapter = AdapterConfig(rank=4, alpha=8.0)
    shift = {"speech": 1.0, "picture": 3.0, "motion": 2.0}
    time_axis = {"speech": 0, "picture": 1, "motion": 0}
    trainer = "loudfail.trainer.update:make"

    def __init__(self, **options):
        super().__init__(**options)
        with torch.random.fork_rng():
            torch.manual_seed(17)
            self.actor = PackedModel().requires_grad_(False)
            for p in self.actor.parameters():
                p.mul_(1.5)
            for block in self.actor.blocks:
                for n in TUNED:
                    setattr(block, n, Tuned(getattr(block, n)))
        self.on, self.engines = None, {}
        self.add_adapter("default", self.adapter)
        self.select_trainable("default")

    # objective
    def shapes(self, case):
        f, h, w = (case.extent[a] for a in ("beats", "tall", "wide"))
        return {"speech": (2 * f, 4), "picture": (2, f, h, w), "motion": (f, 2)}

    def tokenize(self, text):
        return tuple(1 + b for b in text.encode())

    def encode_prompt(self, ids):
        return torch.sin(torch.tensor(ids, dtype=torch.float32)[:, None] * torch.arange(1, 9) * 0.7 + torch.arange(8))

    def rollout_prompt(self, ids):
        return tuple(ids), self.encode_prompt(ids)

    def given_latents(self, case):
        size = 2, 1, case.extent["tall"], case.extent["wide"]
        draws = [torch.Generator().manual_seed(len(prompt) + case.seed % 1000) for prompt in case.prompts]
        return [{name: torch.randn(size, generator=draw) for name in case.given} for draw in draws]

    def conditions(self, case):
        given = self.given_latents(case)
        return [Conditions(i := self.tokenize(p), self.encode_prompt(i), g) for p, g in zip(case.prompts, given, strict=True)]

    def grid(self, calls, case=None):
        u = torch.linspace(1, 0, calls + 1, dtype=torch.float64)
        return {m: (s * u / (1 + (s - 1) * u)).float() for m, s in self.shift.items()}

    def vendor_grid(self, calls, case=None):
        return {m: g.float() for m, g in levels(calls).items()}

    # packing
    def patches(self, x):
        b, c, f, h, w = x.shape
        return x.reshape(b, c, f, h // 2, 2, w // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(b, -1, 4 * c)

    def pack(self, latents):
        return {"speech": latents["speech"], "picture": self.patches(latents["picture"]), "motion": latents["motion"]}

    def unpack(self, rows, case):
        c, f, h, w = self.shapes(case)["picture"]
        x = rows["picture"]
        x = x.reshape(len(x), f, h // 2, w // 2, c, 2, 2).permute(0, 4, 1, 2, 5, 3, 6).reshape(len(x), c, f, h, w).contiguous()
        return {"speech": rows["speech"].clone(), "picture": x, "motion": rows["motion"].clone()}

    def layout(self, case, tokens, given):
        """kinds, places, given of one packed sequence: text, given rows, then beat by beat."""
        f, h, w = (case.extent[a] for a in ("beats", "tall", "wide"))
        n = (h // 2) * (w // 2)
        table = [(0, -1.0, i, False) for i in range(tokens)]
        if given:
            table += [(2, -1.0, i, True) for i in range(n)]
        for b in range(f):
            table += [(1, float(b), 0, False), *((2, float(b), i, False) for i in range(n)), (1, b + 0.5, 0, False), (3, float(b), 0, False)]
        k, t, p, g = zip(*table, strict=True)
        return torch.tensor(k), torch.tensor(list(zip(t, p, strict=True)), dtype=torch.float32), torch.tensor(g)

    def case_of(self, latents):
        _, _, f, h, w = latents["picture"].shape
        return Case(extent={"beats": f, "tall": h, "wide": w})

    def sequence(self, packed, i, condition, kinds, given):
        rows = torch.zeros(len(kinds), 8)
        rows = rows.index_put(((kinds == 0).nonzero()[:, 0],), condition.embeds.float())
        for n, m in enumerate(KINDS[1:], 1):
            rows = rows.index_put((((kinds == n) & ~given).nonzero()[:, 0],), nn.functional.pad(packed[m][i], (0, 8 - WIDTH[m])))
        if bool(given.any()):
            rows = rows.index_put((given.nonzero()[:, 0],), self.patches(condition.given["still"][None])[0])
        return rows

    def parts(self, rows, kinds, given):
        """The generated rows of one sample by modality."""
        return {m: rows[(kinds == n) & ~given][:, : WIDTH[m]] for n, m in enumerate(KINDS[1:], 1)}

    def ask(self, model, latents, sigmas, conditions):
        case, packed, outs = self.case_of(latents), self.pack(latents), []
        for i, c in enumerate(conditions):
            kinds, places, given = self.layout(case, len(c.embeds), "still" in c.given)
            told = torch.stack([torch.tensor(math.nan), *(sigmas[m][i].float() for m in KINDS[1:])])[kinds] * (math.pi / 2)
            told = torch.where(given, torch.zeros(()), told)
            out = model(self.sequence(packed, i, c, kinds, given), kinds, places, told)
            outs.append(self.parts(out, kinds, given))
        x0 = self.unpack({m: torch.stack([o[m] for o in outs]) for m in self.modalities}, case)
        s = {m: sigmas[m].view(-1, *[1] * (x0[m].ndim - 1)) for m in x0}
        return {m: (latents[m] - x0[m]) / s[m] for m in x0}

    def predict_velocity(self, latents, sigmas, conditions):
        return self.ask(self.actor, latents, sigmas, conditions)

    def observe(self, latents, sigmas, conditions):
        tables = []

        def read(module, args, out):
            rows, kinds, places, angles = args
            given = torch.zeros(len(kinds), dtype=torch.bool)
            pic = (kinds == 2).nonzero()[:, 0]
            n = int((kinds == 2).sum()) - self.pack(latents)["picture"].shape[1]
            given[pic[:n]] = True
            values = {m: rows[kinds == k][:, : WIDTH[m]] for k, m in enumerate(KINDS[1:], 1)}
            output = {m: out[kinds == k][:, : WIDTH[m]] for k, m in enumerate(KINDS[1:], 1)}
            for v in output.values():
                if v.requires_grad:
                    v.retain_grad()
            tables.append(RowTable(tuple(KINDS[k] for k in kinds.tolist()), given, angles.detach() * 2 / math.pi, places, values, output))
            again = torch.zeros_like(out)
            for k, m in enumerate(KINDS[1:], 1):
                again = again.index_put(((kinds == k).nonzero()[:, 0],), nn.functional.pad(output[m], (0, 8 - WIDTH[m])))
            return again

        handle = self.actor.register_forward_hook(read)
        try:
            return self.predict_velocity(latents, sigmas, conditions), tables
        finally:
            handle.remove()

    @torch.no_grad()
    def vendor_rollout(self, noise, calls, conditions):
        case, packed, walks, lay = self.case_of(noise), self.pack(noise), [], []
        for i, c in enumerate(conditions):
            kinds, places, given = self.layout(case, len(c.embeds), "still" in c.given)
            lay.append((kinds, given))
            walks.append(list(vendor_loop(self.actor, self.sequence(packed, i, c, kinds, given), kinds, places, given, calls)))
        steps = []
        for moves in zip(*walks, strict=True):

            def latents(at, moves=moves):
                parts = [self.parts(move[at], *places) for move, places in zip(moves, lay, strict=True)]
                return self.unpack({m: torch.stack([part[m] for part in parts]) for m in parts[0]}, case)

            x, after = latents(0), latents(1)
            now, then = ({m: moves[0][at][n].float().repeat(len(moves)) for n, m in enumerate(KINDS[1:])} for at in (2, 3))
            d = {m: (now[m] - then[m]).view(-1, *[1] * (x[m].ndim - 1)) for m in x}
            steps.append(Step(x, now, {m: (x[m] - after[m]) / d[m] for m in x}, after))
        return Trajectory(steps)

    # adapter
    def tuned(self):
        return {n: m for n, m in self.actor.named_modules() if isinstance(m, Tuned)}

    def projections(self):
        return {n: (m.inner.out_features, m.inner.in_features) for n, m in self.tuned().items()}

    def add_adapter(self, name, config):
        with torch.random.fork_rng():
            torch.manual_seed(len(name))
            for m in self.tuned().values():
                m.pairs[name] = Pair(m.inner.out_features, m.inner.in_features, config)
                m.pairs[name].requires_grad_(name == self.on)

    def adapter_names(self):
        return list(next(iter(self.tuned().values())).pairs)

    def tensors(self, name):
        pairs = {n: m.pairs[name] for n, m in self.tuned().items()}
        return {f"{n}.lora_{f}.weight": getattr(pair, own).weight for n, pair in pairs.items() for f, own in (("A", "reduce"), ("B", "expand"))}

    def adapter_state(self, name):
        return {n: v.detach().clone() for n, v in self.tensors(name).items()}

    def load_adapter(self, name, state):
        here = self.tensors(name)
        if {n: v.shape for n, v in here.items()} != {n: v.shape for n, v in state.items()}:
            raise ValueError("names or shapes")
        for n, v in state.items():
            here[n].data.copy_(v)

    def switch(self, name):
        for m in self.tuned().values():
            m.use = name

    @contextmanager
    def using(self, name):
        before = next(iter(self.tuned().values())).use
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def select_trainable(self, name):
        self.on = name
        self.switch(name)
        for m in self.tuned().values():
            for n, p in m.pairs.items():
                p.requires_grad_(n == name)

    def trainable(self):
        names = {}
        for other in self.adapter_names():
            for n, p in self.tensors(other).items():
                names[id(p)] = n.removesuffix("weight") + f"{other}.weight"
        return {names.get(id(p), n): p for n, p in self.actor.named_parameters() if p.requires_grad}

    def base_state(self):
        return {n.replace(".inner.", "."): v.detach().clone() for n, v in self.actor.state_dict().items() if ".pairs." not in n}

    # engine
    def engine(self, degree):
        if degree not in self.engines:
            self.engines[degree] = Engine(self, degree)
        return self.engines[degree]

    def check_degree(self, degree):
        if HEADS % degree:
            raise ValueError(f"{HEADS} heads over {degree} ranks")

    def update(self):
        return find_trainer(self.trainer)(self)

    def classes(self):
        return ["packedport.PackedModel"]
