"""A model on a device, with its KV cache: from the tokens in the batch's table to logits."""

from torch import Tensor

from engine_svc.compute.device_batch import StepTensors
from engine_svc.compute.device_tables import DeviceTables
from engine_svc.compute.devices import Device
from engine_svc.compute.kv_storage import KvStorage, kv_block_bytes
from engine_svc.compute.model.config import ModelConfig
from engine_svc.compute.model.decoder import Decoder
from kernels import Kernels


class DeviceModel:
    """Computes steps once it was given a cache, by `use`."""

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        config: ModelConfig,
        decoder: Decoder,
        tables: DeviceTables,
        block_size: int,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._config = config
        self._decoder = decoder
        self._tables = tables
        self._block_size = block_size
        self._kv: KvStorage | None = None

    @property
    def num_blocks(self) -> int:
        assert self._kv is not None
        return self._kv.num_blocks

    @property
    def block_bytes(self) -> int:
        """What a KV block takes."""
        return kv_block_bytes(self._kernels, self._config, self._block_size)

    def use(self, num_blocks: int) -> None:
        """Takes a new KV cache of so many blocks in the place of the one before; 0 for none."""
        self._kv = None
        if num_blocks:
            with self._device.computing():
                self._kv = KvStorage.allocate(
                    self._kernels, self._config, num_blocks, self._block_size
                )

    def hidden(self, tensors: StepTensors) -> Tensor:
        """The hidden states of a step's kept tokens, [K, hidden]."""
        assert self._kv is not None, "there is no KV cache"
        self._tables.take_tokens(tensors.token_places, tensors.inputs.token_ids)
        return self._decoder.forward(tensors.inputs, self._kv)

    def logits_after(self, hidden: Tensor, places: Tensor) -> Tensor:
        """See Decoder.logits."""
        return self._decoder.logits(hidden, places)

    def logits(self, tensors: StepTensors) -> Tensor:
        """Those that a step samples by, float32 [s, vocab_size]."""
        return self._decoder.logits(self.hidden(tensors), tensors.sample_places)
