"""Simulates a stock market whose conditional mean is known in closed form.

    r(i,t+1) = beta_i f(t+1) + g_s(i)(t+1) + sigma(i,t+1) [alpha(i,t) + eps(i,t+1)]    log returns, clipped at +-30 %

f is GARCH(1,1) with t5 innovations, g one t5 factor per sector, sigma lognormal with an AR(1) logarithm, eps t4.5 with
unit variance and a component shared by the link group. alpha is `snr` times a weighted sum of parts of unit variance,
each a Markov process whose k-step expectation is known:

    reversal    R' = phi R - sqrt(1-phi^2) eps     E[R(t+k)] = phi^k R; its weight halves after 60 % of the span
    lead-lag    like R with + and the eps of the stock's leader, the most traded of its group (Lo and MacKinlay, 1990)
    cycle       sqrt(2) cos(theta), theta' = theta + omega, omega AR(1): Gaussian phase, so
                E[cos theta(t+k)] = cos(mean) exp(-variance / 2)
    quality     AR(1), seen through two features whose noise a mean over the window removes
    regime      (+-1 Markov chain) x (slow AR(1) momentum in eps): the product of two expectations

sigma is independent of the parts, so E[r(t+1..t+h)] is the sum over k of E[sigma] E[alpha]: the oracle. It knows the
latent state, so it is a ceiling rather than an attainable score. The clip moves it by less than the noise of any
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from studies.atft.config import MarketConfig
from studies.atft.table import Table

NUM_SECTORS = 6
GROUP_SIZE = 4
NUM_DECOYS = 20
BURN_IN = 120
CLIP = 0.30
BREAK = 0.6

# Weights of the parts of alpha before the break; their squares sum to 1.008, so alpha's deviation is 1.004 snr.
# Ridge reaches 0.42 of the oracle at h = 1 and 0.54 at h = 5, as `python -m studies.atft.baseline 8` measures.
WEIGHTS = {"reversal": 0.42, "lead_lag": 0.68, "cycle": 0.40, "quality": 0.42, "regime": 0.18}
REVERSAL, LEAD_LAG, QUALITY, MOMENTUM = 0.6, 0.85, 0.98, 0.93
REGIME_STAY = 0.98
OMEGA_AR, OMEGA_SD = 0.9, 0.03
VOL_AR, VOL_SD = 0.97, 0.25
GARCH_ALPHA, GARCH_BETA, MARKET_SD = 0.08, 0.90, 0.009
SECTOR_SD = 0.006
SIZE_SD = 1.5
GROUP_SHARE = 0.5
PERIODS = 8.0, 20.0
LEVEL_SD, FLOW_NOISE, QUALITY_NOISE = 2.0, 0.4, 1.0


@dataclass(frozen=True)
class State:
    """The latent state after day t. Arrays end in the stock axis (1 if the market shares the value)."""

    reversal: np.ndarray
    lead_lag: np.ndarray
    momentum: np.ndarray
    quality: np.ndarray
    theta: np.ndarray
    omega: np.ndarray
    regime: np.ndarray
    log_vol: np.ndarray
    garch: np.ndarray


def student_t(rng: np.random.Generator, df: float, shape: tuple[int, ...]) -> np.ndarray:
    """Returns Student t draws with unit variance."""
    return rng.standard_t(df, shape) * np.sqrt((df - 2) / df)


class Dynamics:
    """The law of the market: fixed attributes of its stocks, one step, and conditional expectations."""

    def __init__(self, config: MarketConfig, rng: np.random.Generator) -> None:
        n = config.num_stocks
        self.snr, self.num_days, self.num_stocks = config.snr, config.num_days, n
        self.group = np.arange(n) // GROUP_SIZE
        self.sector = self.group % NUM_SECTORS
        self.size = rng.normal(18.0, SIZE_SD, n)
        self.leader = np.empty(n, dtype=int)
        for g in range(self.group[-1] + 1):
            members = np.flatnonzero(self.group == g)
            self.leader[members] = members[np.argmax(self.size[members])]
        self.follows = (self.leader != np.arange(n)).astype(float)
        self.beta = rng.normal(1.0, 0.25, n)
        self.log_sigma = np.log(0.018) + 0.3 * rng.standard_normal(n)
        self.omega_mean = 2 * np.pi / rng.uniform(*PERIODS, n)

    def start(self, rng: np.random.Generator, lead: tuple[int, ...] = ()) -> State:
        """Returns a state near stationarity, with leading axes `lead`."""
        per_stock, shared = (*lead, self.num_stocks), (*lead, 1)
        return State(
            reversal=rng.standard_normal(per_stock),
            lead_lag=rng.standard_normal(per_stock) * self.follows,
            momentum=rng.standard_normal(per_stock),
            quality=rng.standard_normal(per_stock),
            theta=rng.uniform(0, 2 * np.pi, per_stock),
            omega=np.broadcast_to(self.omega_mean, per_stock).copy(),
            regime=np.where(rng.random(shared) < 0.5, 1.0, -1.0),
            log_vol=VOL_SD * rng.standard_normal(per_stock),
            garch=np.full(shared, MARKET_SD**2),
        )

    def step(self, state: State, day: int, rng: np.random.Generator) -> tuple[State, np.ndarray]:
        """Returns the state after the next day, and that day's log returns [..., stocks].

        `day` is the day of `state`.
        """
        lead = state.reversal.shape[:-1]
        per_stock, shared = state.reversal.shape, (*lead, 1)
        factor = np.sqrt(state.garch) * student_t(rng, 5, shared)
        sectors = SECTOR_SD * student_t(rng, 5, (*lead, NUM_SECTORS))
        groups = student_t(rng, 4.5, (*lead, int(self.group[-1]) + 1))
        eps = np.sqrt(1 - GROUP_SHARE) * student_t(rng, 4.5, per_stock) + np.sqrt(GROUP_SHARE) * groups[..., self.group]
        sigma = np.exp(self.log_sigma + state.log_vol)
        returns = self.beta * factor + sectors[..., self.sector] + sigma * (self._alpha(state, day, 0) + eps)
        flip = rng.random(shared) >= REGIME_STAY
        after = State(
            reversal=_ar(state.reversal, REVERSAL, -eps),
            lead_lag=_ar(state.lead_lag, LEAD_LAG, eps[..., self.leader] * self.follows),
            momentum=_ar(state.momentum, MOMENTUM, eps),
            quality=_ar(state.quality, QUALITY, rng.standard_normal(per_stock)),
            theta=state.theta + state.omega,
            omega=self.omega_mean
            + OMEGA_AR * (state.omega - self.omega_mean)
            + OMEGA_SD * rng.standard_normal(per_stock),
            regime=np.where(flip, -state.regime, state.regime),
            log_vol=VOL_SD * _ar(state.log_vol / VOL_SD, VOL_AR, rng.standard_normal(per_stock)),
            garch=MARKET_SD**2 * (1 - GARCH_ALPHA - GARCH_BETA) + GARCH_ALPHA * factor**2 + GARCH_BETA * state.garch,
        )
        return after, np.clip(returns, -CLIP, CLIP)

    def expected_return(self, state: State, day: int | np.ndarray, horizon: int) -> np.ndarray:
        """Returns E[r(t+1) + ... + r(t+horizon)] given the state after day t, [..., stocks]."""
        total = np.zeros_like(state.reversal)
        for k in range(horizon):
            decay = VOL_AR**k
            sigma = np.exp(self.log_sigma + decay * state.log_vol + 0.5 * VOL_SD**2 * (1 - decay**2))
            total += sigma * self._alpha(state, day, k)
        return total

    def _alpha(self, state: State, day: int | np.ndarray, k: int) -> np.ndarray:
        """Returns E[alpha(t+k)] given the state after day t; for k = 0 alpha itself."""
        late = np.asarray(day) + k >= BREAK * self.num_days
        drift = (1 - OMEGA_AR**k) / (1 - OMEGA_AR) * (state.omega - self.omega_mean)
        # The shock to omega m days ahead moves theta(t+k) by the sum of its remaining decay.
        spread = sum(((1 - OMEGA_AR ** (k - m)) / (1 - OMEGA_AR)) ** 2 for m in range(1, k)) * OMEGA_SD**2
        phase = state.theta + k * self.omega_mean + drift
        return self.snr * (
            np.where(late, 0.5, 1.0) * WEIGHTS["reversal"] * REVERSAL**k * state.reversal
            + WEIGHTS["lead_lag"] * LEAD_LAG**k * state.lead_lag
            + WEIGHTS["cycle"] * np.sqrt(2) * np.cos(phase) * np.exp(-spread / 2)
            + WEIGHTS["quality"] * QUALITY**k * state.quality
            + WEIGHTS["regime"] * (2 * REGIME_STAY - 1) ** k * state.regime * MOMENTUM**k * state.momentum
        )


@dataclass(frozen=True)
class Market:
    """The observed part of a market (`table`) and its truth: `oracle[h]` [days, stocks], codes in order."""

    table: Table
    codes: np.ndarray
    oracle: dict[int, np.ndarray]


def simulate(config: MarketConfig, seed: int, horizons: tuple[int, ...]) -> Market:
    """Returns the market of (config, seed): the same bytes every time."""
    rng = np.random.default_rng([seed, 0xA7F7])
    law = Dynamics(config, rng)
    state = law.start(rng)
    states, returns = [], []
    for day in range(-BURN_IN, config.num_days):
        # The state kept for day t is the one after r(t); the step from day t - 1 is weighed by day t - 1.
        state, r = law.step(state, day - 1, rng)
        states.append(state)
        returns.append(r)
    path = State(**{f.name: np.stack([getattr(s, f.name) for s in states[BURN_IN:]]) for f in fields(State)})
    days = np.arange(config.num_days)[:, None]
    oracle = {h: law.expected_return(path, days, h) for h in horizons}
    codes = np.array([f"S{i:04d}" for i in range(config.num_stocks)])
    return Market(_observe(law, path, np.stack(returns[BURN_IN:]), codes, rng), codes, oracle)


def _ar(value: np.ndarray, rho: float, shock: np.ndarray) -> np.ndarray:
    """Returns one step of a unit-variance AR(1)."""
    return rho * value + np.sqrt(1 - rho**2) * shock


def _observe(law: Dynamics, path: State, returns: np.ndarray, codes: np.ndarray, rng: np.random.Generator) -> Table:
    """Returns the rows that a data vendor would deliver: prices, volume, features, and their imperfections."""
    columns = {**_prices(law, path, returns, rng), **_features(path, rng)}
    present = _presence(returns.shape, rng)
    days, stocks = np.nonzero(present)
    duplicate = len(days) // 3
    days, stocks = np.insert(days, duplicate, days[duplicate]), np.insert(stocks, duplicate, stocks[duplicate])
    dates = np.busday_offset("2015-01-05", np.arange(len(returns)), roll="forward")
    return Table(
        source="the synthetic market",
        dates=dates[days],
        codes=stocks.astype(np.int32),
        code_names=codes,
        sectors=law.sector[stocks].astype(np.int32),
        sector_names=np.array([f"sector {i}" for i in range(NUM_SECTORS)]),
        columns={name: values[days, stocks] for name, values in columns.items()},
    )


def _prices(law: Dynamics, path: State, returns: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns OHLCV [days, stocks]; one stock splits 2 for 1 without adjustment; ticks of a cent make ties."""
    shape = returns.shape
    sigma = np.exp(law.log_sigma + path.log_vol)
    log_close = np.log(rng.uniform(8.0, 80.0, shape[1])) + np.cumsum(returns, axis=0)
    log_open = log_close - returns * rng.uniform(0.4, 0.9, shape) + 0.15 * sigma * rng.standard_normal(shape)
    high = np.maximum(log_open, log_close) + 0.4 * sigma * np.abs(rng.standard_normal(shape))
    low = np.minimum(log_open, log_close) - 0.4 * sigma * np.abs(rng.standard_normal(shape))
    split = np.zeros(shape)
    split[shape[0] // 3 :, int(rng.integers(shape[1]))] = -np.log(2.0)
    prices = {"open": log_open, "high": high, "low": low, "close": log_close}
    surprise = 0.4 * np.abs(returns) / sigma + 0.3 * rng.standard_normal(shape)
    volume = np.round(np.exp(law.size - log_close - split + surprise))
    return {**{name: np.maximum(np.round(np.exp(v + split), 2), 0.01) for name, v in prices.items()}, "volume": volume}


def _features(path: State, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns flow (a quarter of a cycle behind alpha, on a wandering level), quality proxies, regime and decoys.

    2 % of the values are missing.
    """
    shape = path.theta.shape
    level = np.zeros(shape)
    level[0] = LEVEL_SD * rng.standard_normal(shape[1])
    for t in range(1, shape[0]):
        level[t] = 0.99 * level[t - 1] + LEVEL_SD * np.sqrt(1 - 0.99**2) * rng.standard_normal(shape[1])
    features = {
        "flow": level + np.sqrt(2) * np.sin(path.theta) + FLOW_NOISE * rng.standard_normal(shape),
        "quality_a": path.quality + QUALITY_NOISE * rng.standard_normal(shape),
        "quality_b": 0.7 * path.quality + QUALITY_NOISE * rng.standard_normal(shape),
        "regime": np.broadcast_to(path.regime + 0.5 * rng.standard_normal((shape[0], 1)), shape),
    }
    for i in range(NUM_DECOYS):
        features[f"decoy_{i:02d}"] = rng.standard_normal(shape)
    return {name: np.where(rng.random(shape) < 0.02, np.nan, values) for name, values in features.items()}


def _presence(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Returns which rows exist [days, stocks]: late listings, delistings, halts, thin days, 1 % lost."""
    days, stocks = shape
    present = rng.random(shape) >= 0.01
    order = rng.permutation(stocks)
    few = max(1, stocks // 20)
    for stock in order[:few]:
        present[: int(rng.integers(days // 10, days // 2)), stock] = False
    for stock in order[few : 2 * few]:
        present[int(rng.integers(days // 2, days - days // 10)) :, stock] = False
    for stock in order[2 * few : 4 * few]:
        start = int(rng.integers(days - 20))
        present[start : start + int(rng.integers(5, 15)), stock] = False
    for day in rng.integers(days // 10, days, 3):
        present[day] &= rng.random(stocks) < 0.2
    return present
