"""The hybrid stack: KDA and Gated MLA layers, LatentMoE behind a communicator, AttnRes between.

Shapes: N packed tokens, S sequences, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_comm.communicator import Communicator
from moe_comm.config import EPConfig
from moe_comm.model.build import Builder, ExpertsOfLayer, Layer, Outer, TensorSource
from moe_comm.model.config import K3Config
from moe_comm.model.layers.attn_res import AttnResState
from moe_comm.model.layers.gated_mla import GatedMla
from moe_comm.model.layers.kda import KdaState
from moe_comm.model.layers.latent_moe import LatentMoe
from moe_comm.model.layers.linear import Numerics, linear_fp32
from moe_comm.model.layers.sequence_plan import SequencePlan
from moe_comm.model.parallel import Parallel
from moe_comm.model.serving.batch import ForwardBatch, StateTensors
from moe_comm.model.serving.layout import StateLayout

# Called as observer(layer, name, tensor) while a forward runs. Names: "attention" and "mlp", the
# two outputs [N, D] of a layer (from 0); "topk_idx" and "topk_weights" [T, K] of this rank's token
# slice; "logits" with layer = num_hidden_layers.
Observer = Callable[[int, str, torch.Tensor], None]


def ep_config(
    config: K3Config,
    *,
    max_tokens_per_rank: int,
    numerics: Numerics,
    dispatch_wire: str = "bf16",
    combine_wire: str = "bf16",
    timeout_s: float = 30.0,
) -> EPConfig:
    """The communicator's configuration for this model. Batch-invariant numerics set the combine
    wire to "none": partial sums then travel in float64 and their number does not show."""
    return EPConfig(
        num_experts=config.num_experts,
        num_topk=config.num_experts_per_token,
        hidden=config.routed_expert_hidden_size,
        max_tokens_per_rank=max_tokens_per_rank,
        dispatch_wire=dispatch_wire,
        combine_wire="none" if numerics.batch_invariant else combine_wire,
        timeout_s=timeout_s,
    )


class Transformer:
    """One rank's share of the model.

    `comm` is shared by all MoE layers and stays the caller's. `config`, `parallel` and `numerics`
    are as given; `layout` describes the state that `forward` expects in a batch.
    """

    def __init__(
        self,
        config: K3Config,
        layers: list[Layer],
        outer: Outer,
        *,
        comm: Communicator,
        parallel: Parallel,
        numerics: Numerics,
    ) -> None:
        if len(layers) != config.num_hidden_layers:
            raise ValueError(
                f"layers: expected {config.num_hidden_layers} layers, got {len(layers)}"
            )
        self.config, self.layers, self.outer = config, layers, outer
        self.comm, self.parallel, self.numerics = comm, parallel, numerics
        self._kda_index = {layer: i for i, layer in enumerate(config.kda_layers)}
        self._mla_index = {layer: i for i, layer in enumerate(config.mla_layers)}

    @classmethod
    def build(
        cls,
        config: K3Config,
        source: TensorSource,
        experts: ExpertsOfLayer,
        *,
        comm: Communicator,
        parallel: Parallel | None = None,
        numerics: Numerics | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        on_layer: Callable[[int], None] | None = None,
    ) -> Transformer:
        """Read every dense tensor from `source`, layer by layer, and take each MoE layer's experts
        from `experts(layer)`. `on_layer` is called after each layer, for progress."""
        parallel = Parallel() if parallel is None else parallel
        numerics = Numerics() if numerics is None else numerics
        builder = Builder(
            config,
            source,
            parallel=parallel,
            numerics=numerics,
            device=torch.device(device),
            dtype=dtype,
        )
        layers = []
        for layer in range(config.num_hidden_layers):
            layers.append(builder.layer(layer, experts))
            if on_layer is not None:
                on_layer(layer)
        return cls(config, layers, builder.outer(), comm=comm, parallel=parallel, numerics=numerics)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.outer.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights and activations."""
        return self.outer.embedding.dtype

    def layout(self, *, page_size: int = 64, model_id: str = "") -> StateLayout:
        """The state of one request on this rank."""
        return StateLayout.from_config(
            self.config,
            page_size=page_size,
            tp_rank=self.parallel.tp_rank,
            tp_size=self.parallel.tp_size,
            conv_dtype=self.dtype,
            mla_dtype=self.dtype,
            model_id=model_id,
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        *,
        all_logits: bool = False,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """Run the batch's tokens, prefill chunks and decode alike, and advance their state.

        Collective over all ranks, also for a rank without tokens. All ranks of a tensor-parallel
        group pass the same batch (their own shards of the state).

        Returns logits in fp32, on every rank of the group: [S, vocab], of each sequence's last
        token; with `all_logits` [N, vocab].
        """
        plan = SequencePlan(batch)
        num_tokens = batch.num_tokens
        stream = AttnResState(
            self.outer.embedding[batch.token_ids],
            self.config.attn_res_block_size,
            self.numerics.wide,
        )
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            normed = stream.enter(index, layer.attn_site, layer.input_norm, eps)
            attended = self._attention(index, normed, plan, batch.pool)
            stream.add(attended)
            normed = stream.aggregate(layer.mlp_site, layer.post_norm, eps)
            out = self._mlp(index, normed, batch.bucket, observer)
            stream.add(out)
            if observer is not None:
                observer(index, "attention", attended)
                observer(index, "mlp", out)
        if not num_tokens:
            return self.outer.head.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        normed = stream.aggregate(self.outer.site, self.outer.norm, eps)
        if not all_logits:
            normed = normed[plan.last_tokens]
        logits = self.parallel.gather_columns(linear_fp32(normed, self.outer.head, self.numerics))
        if observer is not None:
            observer(len(self.layers), "logits", logits)
        return logits

    def _attention(
        self, index: int, x: torch.Tensor, plan: SequencePlan, pool: StateTensors
    ) -> torch.Tensor:
        if not x.shape[0]:
            # The whole tensor-parallel group is idle, so no rank of it waits in a collective.
            return x
        attention = self.layers[index].attention
        if isinstance(attention, GatedMla):
            cache = plan.batch.cache[self._mla_index[index]]
            return attention.forward(x, plan, cache, self.parallel)
        at = self._kda_index[index]
        state = KdaState(
            recurrent=pool.recurrent[at],
            conv_q=pool.conv["q"][at],
            conv_k=pool.conv["k"][at],
            conv_v=pool.conv["v"][at],
        )
        return attention.forward(x, plan, state, self.parallel)

    def _mlp(
        self, index: int, x: torch.Tensor, bucket: int, observer: Observer | None
    ) -> torch.Tensor:
        mlp = self.layers[index].mlp
        if not isinstance(mlp, LatentMoe):
            return mlp.forward(x, self.parallel) if x.shape[0] else x
        if observer is None:
            return mlp.forward(x, self.comm, self.parallel, bucket=bucket)
        report = observer

        def on_routing(idx: torch.Tensor, weights: torch.Tensor) -> None:
            report(index, "topk_idx", idx)
            report(index, "topk_weights", weights)

        return mlp.forward(x, self.comm, self.parallel, bucket=bucket, on_routing=on_routing)
