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
