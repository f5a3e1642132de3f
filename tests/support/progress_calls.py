"""A progress that keeps what it is told."""


class Counted:
    """Stages as lists of name, total and bytes done; and whether the end was told."""

    def __init__(self):
        self.stages, self.ended = [], False

    def start(self, total_bytes, description):
        self.stages.append([description, total_bytes, 0])
        self.ended = False

    def advance(self, n_bytes):
        self.stages[-1][2] += n_bytes

    def stop(self):
        self.ended = True


class AfterBlocks(Counted):
    """Does something once, after so many blocks."""

    def __init__(self, act, blocks):
        super().__init__()
        self.act, self.left = act, blocks

    def advance(self, n_bytes):
        super().advance(n_bytes)
        self.left -= 1
        if self.left == 0:
            self.act()


class AfterShare(Counted):
    """Fails once more than a share of a stage's bytes is done."""

    def __init__(self, error, share, *, stage=""):
        super().__init__()
        self.error, self.share, self.stage = error, share, stage

    def advance(self, n_bytes):
        super().advance(n_bytes)
        description, total, done = self.stages[-1]
        if description.startswith(self.stage) and done > total * self.share:
            raise self.error
