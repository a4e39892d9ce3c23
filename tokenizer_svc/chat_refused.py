"""The error of everything that reads or renders a chat.

It stands apart from protos.wire.errors because the template worker, which raises it, loads neither
gRPC nor protobuf.
"""


class ChatRefused(Exception):
    """These messages cannot become a prompt; `message` is a sentence for the user.

    `param` names the request field at fault, `code` is a stable word for programs.
    """

    def __init__(self, message: str, *, param: str = "messages", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
