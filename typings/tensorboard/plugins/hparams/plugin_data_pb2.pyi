from collections.abc import MutableMapping

class _Value:
    number_value: float
    string_value: str

class SessionStartInfo:
    hparams: MutableMapping[str, _Value]
    def __init__(self, *, group_name: str = ..., start_time_secs: float = ...) -> None: ...

class SessionEndInfo:
    def __init__(self, *, status: int = ..., end_time_secs: float = ...) -> None: ...

class HParamsPluginData:
    def __init__(
        self, *, session_start_info: SessionStartInfo = ..., session_end_info: SessionEndInfo = ...
    ) -> None: ...
