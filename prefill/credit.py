"""How many plane bytes may be under way."""

from core.errors import InvalidArgument


class CreditWindow:
    """`limit_bytes` at most are outstanding; a message larger than that goes alone."""

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise InvalidArgument("credit_bytes", f"{limit_bytes} bytes of credit let nothing be sent")
        self._limit_bytes = limit_bytes
        self.outstanding_bytes = 0

    def allows(self, num_bytes: int) -> bool:
        """Whether a message may be sent now."""
        return self.outstanding_bytes == 0 or self.outstanding_bytes + num_bytes <= self._limit_bytes

    def sent(self, num_bytes: int) -> None:
        """A message is under way."""
        self.outstanding_bytes += num_bytes

    def returned(self, num_bytes: int) -> None:
        """The receiver has taken bytes in. Raises InvalidArgument where it had none to take."""
        if not 0 < num_bytes <= self.outstanding_bytes:
            raise InvalidArgument(
                "credit.bytes", f"{num_bytes} bytes returned, {self.outstanding_bytes} were under way"
            )
        self.outstanding_bytes -= num_bytes
