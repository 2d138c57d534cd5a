"""A clock that replays samples taken before, because pytest-benchmark only times what it calls itself."""

from collections.abc import Callable


class Replay:
    time = 0.0

    def now(self) -> float:
        return self.time

    def of(self, samples: list[float]) -> Callable[[], None]:
        durations = iter(samples)

        def pass_time() -> None:
            self.time += next(durations)

        return pass_time


replay = Replay()
