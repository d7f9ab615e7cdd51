"""The eight requests of the lab: a fixture small enough to judge by hand, the same everywhere it is used.

The window is 0 to 20 s, the contract the exercise contract: first token within 300 ms, no gap above 30 ms. A, B and C
qualify, so attainment is 3/8, goodput 3/20 s = 0.15 req/s, token goodput (40 + 60 + 25)/20 s = 6.25 tokens/s, and what
was observed 285/20 s = 14.25 tokens/s. With gaps up to 80 ms E qualifies too: 4/8 and 173/20 s = 8.65 tokens/s.
"""

from typing import NamedTuple

from sloscope.units import NS_PER_S

WINDOW_S = 20
NS_PER_MS = 1_000_000


class LabRequest(NamedTuple):
    name: str
    send_s: int
    ttft_ms: int
    tokens: int  # one a stream event
    largest_gap_ms: int
    outcome: str
    reason: str

    @property
    def send_ns(self) -> int:
        return self.send_s * NS_PER_S

    @property
    def receipts_ns(self) -> list[int]:
        """Receipt stamps after time 0. The second token takes the largest gap, every later one 2 ms less."""
        stamps = [self.send_ns + self.ttft_ms * NS_PER_MS]
        for number in range(1, self.tokens):
            gap_ms = self.largest_gap_ms if number == 1 else self.largest_gap_ms - 2
            stamps.append(stamps[-1] + gap_ms * NS_PER_MS)
        return stamps

    @property
    def end_ns(self) -> int:
        """The stream ended 1 ms after its last token."""
        return self.receipts_ns[-1] + NS_PER_MS


REQUESTS = (
    LabRequest("A", 0, 180, 40, 24, "completed", ""),
    LabRequest("B", 2, 240, 60, 28, "completed", ""),
    LabRequest("C", 4, 300, 25, 30, "completed", ""),
    LabRequest("D", 6, 420, 50, 22, "completed", ""),
    LabRequest("E", 8, 120, 48, 75, "completed", ""),
    LabRequest("F", 10, 350, 30, 45, "completed", ""),
    LabRequest("G", 12, 150, 12, 21, "failed", "in_band_error"),
    LabRequest("H", 14, 200, 20, 25, "cancelled", "voluntary"),
)
