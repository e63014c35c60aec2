"""A plain model: placement of checkpoints in the tree of pages, and who is evicted."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

@dataclass
class Opt:
    interval: int = 1024
    use_interval: bool = True
    interval_abs: bool = True
    parts: int = 64        # pages
    credit: int = 1024
    prior: float = 16
    p0: dict = field(default_factory=lambda: dict(fresh=.4, cont=.8, branch=.8, side=.4, end=.4))
    fresh_def: str = "resumed_tail"  # or "hit0"
    supersede: str = "nearest"
    count_mode: str = "save"   # save | unsuper
    both: str = "branch"
    scratch_place: bool = True
    promote_count: bool = True
    gd: bool = False
    nomore: str = "branch"   # kind of a cut at found where the tree does not go on: branch | interval | skip | tail
    side: bool = False       # a third kind of tail
    exact: bool = False
    renew: str = "one"       # one | branches
    uncount: str = "no"      # no | same | all
    sweep: int = 0
    repeat: bool = False
    lru: bool = False

class Ck:
    __slots__ = ("nodes", "depth", "node", "kind", "cls", "touch", "seq", "resumed", "ver", "counted", "owner", "orig")

class Sim:
    def __init__(self, paths, n, opt):
        self.P, self.n, self.o = paths, n, opt
        self.at = {}
        self.has = np.zeros(paths.num_nodes, bool)
        self.seq = 0
        self.heap = [[], []]
        self.I = 0.0
        self.saved = dict(fresh=0, cont=0, branch=0, side=0, end=0)
        self.res = dict(fresh=0, cont=0, branch=0, side=0, end=0)
        self.num = [0, 0]
        self.held = 0   # scratch ids
        self.hit = 0
        self.ev = 0
        from collections import deque
        self.ring = deque()
    # ---- policy
    def p(self, kind):
        o = self.o
        return (self.res[kind] + o.prior * o.p0[kind]) / (self.saved[kind] + o.prior)
    def gap(self, c):
        b = np.flatnonzero(self.has[c.nodes[: c.depth - 1]])
        return (c.depth - (b[-1] + 1 if len(b) else 0)) * self.P.page_tokens
    def key(self, c):
        if self.o.lru: return c.seq
        if c.cls == 1:
            return math.floor(math.log2(self.gap(c)))
        return c.touch + (self.p(c.kind) if not self.o.gd else 1) * self.gap(c)
    def push(self, c):
        c.ver += 1
        heapq.heappush(self.heap[c.cls], (self.key(c), c.seq, c.ver, id(c), c))
    def count(self, kind, what, d=1):
        if kind not in self.saved: return
        t = self.saved if what == "s" else self.res
        t[kind] += d
        if self.saved[kind] > 2000:
            self.saved[kind] /= 2; self.res[kind] /= 2
    def evict(self):
        done = 0
        while self.o.sweep and self.ring and done < self.o.sweep:
            c = self.ring.popleft()
            if self.at.get(c.node) is not c: continue
            self.ring.append(c); self.push(c); done += 1
        for cls in (1, 0):
            h = self.heap[cls]
            if self.o.exact:
                cs = [c for c in self.at.values() if c.cls == cls]
                if not cs: continue
                k, _, c = min((self.key(c), c.seq, c) for c in cs)
                if cls == 0: self.I = max(self.I, k)
                self.drop(c)
                return True
            while h:
                k, s, v, _, c = heapq.heappop(h)
                if c.ver != v or self.at.get(c.node) is not c or c.cls != cls: continue
                k2 = self.key(c)
                if k2 > k:
                    heapq.heappush(h, (k2, s, v, id(c), c)); continue
                if cls == 0: self.I = max(self.I, k)
                self.drop(c); self.ev += 1
                return True
        return False
    def drop(self, c):
        del self.at[c.node]; self.has[c.node] = False; self.num[c.cls] -= 1
    def room(self, interval):
        """take an id: True if there is one"""
        if len(self.at) + self.held < self.n: return True
        if interval and self.num[1] == 0 and not self.o.gd: return False
        return self.evict()
    def insert(self, nodes, depth, kind, owner):
        node = int(nodes[depth - 1])
        old = self.at.get(node)
        if old: return old
        c = Ck(); c.nodes, c.depth, c.node, c.kind, c.owner = nodes, depth, node, kind, owner
        c.orig = kind
        c.cls = 1 if kind == "interval" and not self.o.gd else 0
        c.touch = self.I; self.seq += 1; c.seq = self.seq; c.resumed = False; c.ver = 0; c.counted = False
        self.at[node] = c; self.has[node] = True; self.num[c.cls] += 1
        if kind != "interval" and self.o.count_mode == "save":
            self.count(kind, "s"); c.counted = True
        self.push(c); self.ring.append(c)
        if kind in ("fresh", "cont", "side"): self.supersede(c)
        return c
    def supersede(self, c):
        if self.o.gd or self.o.supersede == "none": return
        for i in np.flatnonzero(self.has[c.nodes[: c.depth - 1]])[::-1]:
            a = self.at[int(c.nodes[i])]
            if a.cls == 1 : continue
            if a.kind in ("fresh", "cont", "side"):
                self.num[0] -= 1; self.num[1] += 1
                a.cls = 1; self.push(a)
                if self.o.uncount != "no" and not a.resumed and (self.o.uncount == "all" or a.owner == c.owner):
                    self.count(a.kind, "s", -1)
                if self.o.supersede == "all": continue
            if self.o.supersede == "through": continue
            break
    def find(self, path):
        b = np.flatnonzero(self.has[path.nodes[: path.limit]])
        return int(b[-1]) + 1 if len(b) else 0
    def resume(self, path, hit):
        if not hit: return None
        c = self.at[int(path.nodes[hit - 1])]
        o = self.o
        if (path.found - hit) * self.P.page_tokens <= o.credit and not c.resumed and c.orig != 'interval':
            c.resumed = True
            if not c.counted: self.count(c.kind, "s"); c.counted = True
            self.count(c.orig if not o.promote_count else c.kind, "r")
        was = c.kind
        parts = path.found < path.limit and path.found - hit <= o.parts and self.parts_here(path)
        if parts and c.kind != "branch" and not o.gd:
            if c.cls == 1: self.num[1] -= 1; self.num[0] += 1
            c.cls = 0
            c.kind = "branch"
            if o.promote_count: self.count("branch", "s"); self.count("branch", "r"); c.counted = True; c.resumed = True
        c.touch = self.I
        self.seq += 1
        c.seq = self.seq
        self.push(c)
        if o.renew == "branches":
            for i in np.flatnonzero(self.has[c.nodes[: c.depth - 1]])[::-1]:
                a = self.at[int(c.nodes[i])]
                if a.kind == "branch": a.touch = self.I; self.push(a)
        return was
    def parts_here(self, path):
        return path.more
    # ---- a request
    def request(self, t, path, chunk):
        o, page = self.o, self.P.page_tokens
        hit = self.find(path)
        self.hit += hit * page
        was = self.resume(path, hit)
        if o.fresh_def == "resumed_tail": tail = "cont" if was in ("fresh", "cont", "side") else "fresh"
        elif o.fresh_def == "notbranch": tail = "cont" if was in ("fresh", "cont", "interval") else "fresh"
        else: tail = "cont" if hit else "fresh"
        if o.fresh_def == "end": tail = "cont" if path.found and not path.more else "fresh"
        if o.fresh_def == "endside": tail = "cont" if path.found and not path.more else "side" if path.found > 0 else "fresh"
        if o.fresh_def == "or": tail = "cont" if path.found and not path.more or was in ("fresh","cont") else "fresh"
        if o.side: tail = "cont" if was in ("fresh", "cont", "side") else "side" if hit else "fresh"
        yield
        cuts = {}
        if o.use_interval and o.interval:
            step = o.interval // page
            start = step * (hit // step + 1) if o.interval_abs else hit + step
            for d in range(start, path.limit + 1, step): cuts[d] = "interval"
        if path.limit > hit: cuts[path.limit] = tail
        if path.found > hit and (path.found < path.limit or o.both == "branch"):
            k = "branch" if path.more or (o.repeat and path.found == path.limit) else o.nomore
            if k == "tail": k = tail
            if k != "skip": cuts[path.found] = k
        at = hit
        for d in sorted(cuts):
            while at + chunk // page < d: at += chunk // page; yield
            at = d
            kind = cuts[d]
            old = self.at.get(int(path.nodes[d-1]))
            if old is None and self.room(kind == "interval"):
                self.insert(path.nodes, d, kind, t)
            yield
        end = len(path.nodes)
        if end > max(hit, path.limit):
            if self.room(False):
                self.held += 1
                yield
                self.held -= 1
                self.insert(path.nodes, end, tail, t)
    def run(self):
        P = self.P
        for f in range(0, len(P.requests), P.running):
            g = [self.request(t, p, P.chunk) for t, p in enumerate(P.requests[f:f + P.running], f)]
            while g:
                g = [x for x in g if next(x, 0) is None]
        return self.hit
