"""A taskset of the package verifiers: double a number, by head or with a tool."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int


class Arithmetic(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def double(self, number: int) -> int:
        """Twice a number."""
        return 2 * number


class TaskConfig(vf.TaskConfig):
    with_tools: bool = False
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Double(vf.Task[Data, vf.State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Arithmetic(config.tools)] if config.with_tools else []

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        print("scored")  # to standard output, where answers are
        return float(trace.last_reply == str(2 * self.data.number))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @vf.reward
    async def breaks(self, trace) -> float:
        return 1 / float(trace.last_reply != "break") - 1.0


class Config(vf.TasksetConfig):
    size: int = 5
    task: TaskConfig = TaskConfig()


class Doubles(vf.Taskset[Double, Config]):
    def load(self):
        for number in range(self.config.size):
            yield Double(
                Data(prompt=f"Twice {number}?", system_prompt="Be brief.", number=number),
                self.config.task,
            )


__all__ = ["Doubles"]

if __name__ == "__main__":
    Arithmetic.run()
