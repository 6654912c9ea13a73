"""An agent learns to balance a pole; observers on other ranks play, and ask it what to do.

    torchrun --nproc-per-node 3 examples/python/remote_rl.py
    torchrun --nproc-per-node 3 examples/python/remote_rl.py --seed 1 --rounds 40

Rank 0 has the agent, a small net that learns by its policy's gradient (REINFORCE). The others play
CartPole, whose equations are written out here. For each step an observer asks the agent, through
the Ref that it was called with, how likely a push to the right should be. Random numbers depend on
the seed and on the number of the episode, so rewards do not depend on how many observers there are.

A program in C++ may observe, too: examples/cpp/remote_observer.cpp plays the same episodes.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import trireme
from torch import Tensor, nn
from trireme import remote

EPISODES = 8  # make a round, after which the agent learns
MOST_STEPS = 200  # end an episode
GOOD = 150  # is the average reward of five rounds that training ends with
DISCOUNT = 0.99
WORD = (1 << 64) - 1


def uniform_numbers(seed: int) -> Iterator[float]:
    """Numbers in [0, 1): SplitMix64, which C++ writes down in the same few lines."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & WORD
        mixed = state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & WORD
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & WORD
        yield ((mixed ^ mixed >> 31) >> 11) / float(1 << 53)


class CartPole:
    """A pole on a cart, after Barto, Sutton and Anderson (1983): SI units, Euler's steps."""

    GRAVITY, CART, POLE, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
    FORCE, SECONDS = 10.0, 0.02
    FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360

    def __init__(self, drawn: Iterator[float]) -> None:
        self.x, self.speed, self.angle, self.turning = (0.1 * next(drawn) - 0.05 for _ in range(4))

    def state(self) -> list[float]:
        return [self.x, self.speed, self.angle, self.turning]

    def push(self, to_the_right: bool) -> bool:
        """Goes on by one step; returns whether the pole still stands."""
        force = self.FORCE if to_the_right else -self.FORCE
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        total, moment = self.CART + self.POLE, self.POLE * self.HALF_LENGTH
        common = (force + moment * self.turning * self.turning * sine) / total
        turning_more = (self.GRAVITY * sine - cosine * common) / (
            self.HALF_LENGTH * (4.0 / 3.0 - self.POLE * cosine * cosine / total)
        )
        faster = common - moment * turning_more * cosine / total
        self.x += self.SECONDS * self.speed
        self.speed += self.SECONDS * faster
        self.angle += self.SECONDS * self.turning
        self.turning += self.SECONDS * turning_more
        return abs(self.x) <= self.FARTHEST and abs(self.angle) <= self.STEEPEST


def play_episode(likely: Callable[[Tensor], float], seed: int) -> Tensor:
    """Plays until the pole falls. Has a row for each step: the state, and 1 for a push right."""
    drawn = uniform_numbers(seed)
    pole = CartPole(drawn)
    rows: list[list[float]] = []
    stands = True
    while stands and len(rows) < MOST_STEPS:
        state = pole.state()
        to_the_right = next(drawn) < likely(torch.tensor(state))
        rows.append([*state, float(to_the_right)])
        stands = pole.push(to_the_right)
    return torch.tensor(rows)


class Agent(remote.Object):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.02)

    @remote.method
    def act(self, state: Tensor) -> float:
        """How likely a push to the right should be. Observers call it, several at one time."""
        with torch.no_grad():
            return self.policy(state).softmax(0)[1].item()

    def learn(self, episodes: Sequence[Tensor]) -> None:
        """One step: actions that were followed by more reward than others become likelier."""
        rows = torch.cat(list(episodes))
        rewards = torch.cat([rewards_to_come(len(episode)) for episode in episodes])
        worth = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        chosen = rows[:, 4].long()
        likely = self.policy(rows[:, :4]).log_softmax(1)[torch.arange(len(rows)), chosen]
        self.optimizer.zero_grad()
        (-likely * worth).mean().backward()
        self.optimizer.step()


def rewards_to_come(steps: int) -> Tensor:
    """Each step is a reward of 1; a later one counts less."""
    return (1 - DISCOUNT ** torch.arange(steps, 0, -1)) / (1 - DISCOUNT)


class Observer(remote.Object):
    @remote.method
    def play(self, agent: remote.Ref, seed: int) -> Tensor:
        return play_episode(agent.act, seed)


def train(seed: int, rounds: int) -> None:
    agent = Agent(seed)
    shown = remote.here(agent)
    observers = [remote.create(name, Observer) for name in remote.names()[1:]]
    averages: list[float] = []
    while len(averages) < rounds and sum(averages[-5:]) < 5 * GOOD:
        first = (seed << 32) + len(averages) * EPISODES
        pending = [
            observers[number % len(observers)].play.start(shown, first + number)
            for number in range(EPISODES)
        ]
        episodes = [call.wait() for call in pending]
        averages.append(sum(map(len, episodes)) / EPISODES)
        print(f"round {len(averages):3d}  average reward {averages[-1]:.1f}", flush=True)
        agent.learn(episodes)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args(command_line)
    ctx = trireme.init(device="cpu")
    if ctx.world < 2:
        parser.error("start two ranks or more: one has the agent, the others play")
    remote.start("agent" if ctx.rank == 0 else f"observer{ctx.rank}")
    if ctx.rank == 0:
        train(arguments.seed, arguments.rounds)
    remote.stop()  # observers serve until the agent is here
    trireme.shutdown()


if __name__ == "__main__":
    main()
