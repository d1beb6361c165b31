"""Traces tiny models of torchvision and transformers, with random weights in float64, for real_models_test.

    trace_models.py FOLDER           writes FOLDER/NAME.pt (a TorchScript module) and FOLDER/NAME.inputs for every model
    trace_models.py FOLDER NAME...   does so for these models

Batches have 3 items, so that two ranks have uneven pieces. Models are in training mode (batch norms use the batch's own
statistics), but draw no random numbers: every dropout probability is 0.
"""

import contextlib
import pathlib
import sys
from unittest import mock

import torch
import torchvision
from torch import nn
from torchvision.models import (
    convnext,
    densenet,
    efficientnet,
    maxvit,
    mobilenetv2,
    mobilenetv3,
    regnet,
    resnet,
    segmentation,
    shufflenetv2,
    swin_transformer,
    vgg,
    video,
    vision_transformer,
)
from torchvision.models._utils import IntermediateLayerGetter
import transformers

BATCH = 3
CLASSES = 5
MODELS = {}


def model(make):
    """Registers `make`, a function of no arguments that returns a module and its inputs, under its name."""
    MODELS[make.__name__] = make
    return make


# Inputs.


def image(height, width=None, channels=3):
    return torch.randn(BATCH, channels, height, width or height)


def clip(frames, height):
    return torch.randn(BATCH, 3, frames, height, height)


def ids(length=6, vocabulary=20):
    return torch.randint(3, vocabulary, (BATCH, length))


# torchvision.


@contextlib.contextmanager
def narrowed(by=8):
    """While it is entered, layers are made with 1/by of the channels: many torchvision models have no width argument."""

    def fewer(channels):
        return channels if channels < 8 else max(1, channels // by)

    def convolution(made, self, in_channels, out_channels, *args, groups=1, **kwargs):
        few = fewer(in_channels)
        if groups > 1:
            groups = few if groups == in_channels else fewer(groups)
        made(self, few, fewer(out_channels), *args, groups=groups, **kwargs)

    def linear(made, self, inner, outer, *args, **kwargs):
        made(self, fewer(inner), fewer(outer), *args, **kwargs)

    def norm(made, self, channels, *args, **kwargs):
        made(self, fewer(channels), *args, **kwargs)

    changed = {nn.Conv2d: convolution, nn.Conv3d: convolution, nn.Linear: linear, nn.BatchNorm2d: norm, nn.BatchNorm3d: norm}
    kept = {kind: kind.__dict__["__init__"] for kind in (nn.Conv2d, nn.Conv3d, nn.Linear)}
    kept[nn.BatchNorm2d] = kept[nn.BatchNorm3d] = nn.modules.batchnorm._BatchNorm.__init__
    for kind, how in changed.items():
        kind.__init__ = lambda self, *args, _how=how, _made=kept[kind], **kwargs: _how(_made, self, *args, **kwargs)
    try:
        yield
    finally:
        for kind in changed:
            if issubclass(kind, nn.modules.batchnorm._BatchNorm):
                del kind.__init__
            else:
                kind.__init__ = kept[kind]


class Results(nn.Module):
    """Returns the named tensors of a model's result, a dictionary or a dataclass, as a tuple."""

    def __init__(self, model, names, call=None):
        super().__init__()
        self.model = model
        self.names = names
        self.call = call or (lambda model, *inputs: model(*inputs))

    def forward(self, *inputs):
        out = self.call(self.model, *inputs)
        return tuple(out[name] for name in self.names)


@model
def alexnet():
    with narrowed():
        return torchvision.models.alexnet(num_classes=CLASSES), image(64)


@model
def vgg11_bn():
    with narrowed():
        features = vgg.make_layers([64, "M", 128, "M", 256, 256, "M", 512, "M"], batch_norm=True)
        return vgg.VGG(features, num_classes=CLASSES, init_weights=False), image(32)


@model
def resnet18():
    with narrowed():
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES), image(40)


@model
def resnet50():
    with narrowed():
        return resnet.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=CLASSES), image(40)


@model
def resnext50():
    with narrowed():
        return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, groups=32, width_per_group=4), image(40)


@model
def wide_resnet50():
    with narrowed():
        return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=128), image(40)


@model
def densenet121():
    return densenet.DenseNet(4, (2, 2, 2, 2), 8, num_classes=CLASSES, drop_rate=0), image(40)


@model
def googlenet():
    with narrowed():
        return torchvision.models.GoogLeNet(CLASSES, aux_logits=False, init_weights=False), image(40)


@model
def inception_v3():
    with narrowed(16):
        return torchvision.models.Inception3(CLASSES, aux_logits=False, init_weights=False), image(79)


@model
def squeezenet():
    with narrowed():
        return torchvision.models.SqueezeNet("1_1", CLASSES), image(40)


@model
def mobilenet_v2():
    settings = [[1, 8, 1, 1], [6, 16, 2, 2], [6, 24, 1, 2]]
    with narrowed(4):
        return mobilenetv2.MobileNetV2(CLASSES, inverted_residual_setting=settings), image(32)


@model
def mobilenet_v3():
    make = mobilenetv3.InvertedResidualConfig
    settings = [
        make(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        make(16, 3, 72, 24, False, "RE", 2, 1, 1.0),
        make(24, 5, 96, 40, True, "HS", 2, 1, 1.0),
        make(40, 5, 120, 48, True, "HS", 1, 2, 1.0),
    ]
    with narrowed(4):
        return mobilenetv3.MobileNetV3(settings, 64, CLASSES), image(40)


@model
def shufflenet_v2():
    return shufflenetv2.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 64], CLASSES), image(40)


@model
def mnasnet():
    with narrowed():
        return torchvision.models.MNASNet(0.5, CLASSES), image(40)


@model
def efficientnet_v1():
    make = efficientnet.MBConvConfig
    settings = [make(1, 3, 1, 32, 16, 1, 1.0, 1.0), make(6, 3, 2, 16, 24, 2, 1.0, 1.0), make(6, 5, 2, 24, 40, 1, 1.0, 1.0)]
    with narrowed(4):
        return efficientnet.EfficientNet(settings, 0.0, 0.0, CLASSES, last_channel=64), image(32)


@model
def efficientnet_v2():
    fused, make = efficientnet.FusedMBConvConfig, efficientnet.MBConvConfig
    settings = [fused(1, 3, 1, 24, 24, 1), fused(4, 3, 2, 24, 48, 2), make(4, 3, 2, 48, 64, 1)]
    with narrowed(4):
        return efficientnet.EfficientNet(settings, 0.0, 0.0, CLASSES, last_channel=64), image(32)


@model
def regnet_y():
    block = regnet.BlockParams(depths=[1, 2], widths=[16, 32], group_widths=[8, 8], bottleneck_multipliers=[1.0, 1.0], strides=[2, 2], se_ratio=0.25)
    return regnet.RegNet(block, CLASSES, stem_width=8), image(32)


@model
def convnext_tiny():
    make = convnext.CNBlockConfig
    return convnext.ConvNeXt([make(8, 16, 1), make(16, 24, 2), make(24, None, 1)], 0.0, 0.5, CLASSES), image(32)


@model
def vit_b_16():
    return vision_transformer.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=CLASSES), image(32)


@model
def swin_t():
    return swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0), image(32)


@model
def swin_v2_t():
    return (
        swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0,
                                         block=swin_transformer.SwinTransformerBlockV2,
                                         downsample_layer=swin_transformer.PatchMergingV2),
        image(32),
    )


@model
def maxvit_t():
    return maxvit.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES), image(32)


def backbone():
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])


def segmenter(make):
    with narrowed():
        layers = IntermediateLayerGetter(backbone(), {"layer4": "out", "layer3": "aux"})
        return make(layers, segmentation.fcn.FCNHead(256, CLASSES)), image(48)


@model
def fcn():
    made, x = segmenter(lambda layers, aux: segmentation.FCN(layers, segmentation.fcn.FCNHead(512, CLASSES), aux))
    return Results(made, ["out", "aux"]), x


@model
def deeplab_v3():
    made, x = segmenter(lambda layers, aux: segmentation.DeepLabV3(layers, segmentation.deeplabv3.DeepLabHead(512, CLASSES, (2, 3)), aux))
    return Results(made, ["out", "aux"]), x


@model
def lraspp():
    with narrowed():
        layers = IntermediateLayerGetter(backbone(), {"layer2": "low", "layer4": "high"})
        return Results(segmentation.LRASPP(layers, 128, 512, CLASSES, 32), ["out"]), image(48)


def video_resnet(convolutions):
    with narrowed():
        make = video.resnet
        return make.VideoResNet(make.BasicBlock, convolutions(make), [1, 1, 1, 1], make.BasicStem, CLASSES), clip(4, 16)


@model
def r3d_18():
    return video_resnet(lambda make: [make.Conv3DSimple] * 4)


@model
def mc3_18():
    return video_resnet(lambda make: [make.Conv3DSimple] + [make.Conv3DNoTemporal] * 3)


@model
def s3d():
    with narrowed():
        made = video.S3D(CLASSES)
    made.avgpool = nn.AvgPool3d((2, 1, 1), stride=1)  # for smaller clips than the 7 x 7 of its own
    return made, clip(16, 32)


@model
def mvit_v2():
    make = video.mvit.MSBlockConfig
    blocks = [
        make(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        make(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return (
        video.MViT((16, 16), 4, blocks, True, True, False, True, num_classes=CLASSES, patch_embed_kernel=(3, 3, 3),
                   patch_embed_stride=(2, 2, 2), patch_embed_padding=(1, 1, 1)),
        clip(4, 16),
    )


# transformers.


def broadcast_mask(mask_function, bh_indices=True):
    """Does without vmap, which torch.jit.trace cannot follow, what transformers.masking_utils does with it."""

    def mask(batch, head, query, key):
        return mask_function(batch[:, None, None, None], head[None, :, None, None], query[:, None], key)

    return mask


transformers.masking_utils._vmap_for_bhqkv = broadcast_mask
transformers.masking_utils.TransformGetItemToIndex = contextlib.nullcontext  # for indices under vmap


def tiny(**more):
    return dict(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
                max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2) | more


def text(kind, config, call=None, inputs=None, results=("logits",)):
    config.use_cache = False
    # Training mode would only add random draws to these models, except for Bloom, whose GELU is then a Python function
    # that cannot be traced.
    return Results(kind(config).eval(), results, call), inputs if inputs is not None else ids()


@model
def bert():
    return text(transformers.BertForMaskedLM, transformers.BertConfig(**tiny()))


@model
def roberta():
    return text(transformers.RobertaForMaskedLM, transformers.RobertaConfig(**tiny()))


@model
def distilbert():
    config = transformers.DistilBertConfig(vocab_size=20, dim=16, n_layers=2, n_heads=4, hidden_dim=32, max_position_embeddings=16)
    return text(transformers.DistilBertForMaskedLM, config)


@model
def albert():
    return text(transformers.AlbertForMaskedLM, transformers.AlbertConfig(**tiny(embedding_size=8)))


@model
def electra():
    return text(transformers.ElectraForPreTraining, transformers.ElectraConfig(**tiny(embedding_size=8)))


@model
def mpnet():
    return text(transformers.MPNetForMaskedLM, transformers.MPNetConfig(**tiny()))


@model
def deberta_v2():
    config = transformers.DebertaV2Config(**tiny(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8))
    return text(transformers.DebertaV2ForMaskedLM, config)


@model
def deberta():
    config = transformers.DebertaConfig(**tiny(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8))
    return text(transformers.DebertaForMaskedLM, config)


@model
def gpt2():
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    return text(transformers.GPT2LMHeadModel, config)


@model
def gpt_neo():
    config = transformers.GPTNeoConfig(vocab_size=20, hidden_size=16, num_layers=2, attention_types=[[["global", "local"], 1]],
                                       num_heads=4, intermediate_size=32, max_position_embeddings=16, window_size=3)
    return text(transformers.GPTNeoForCausalLM, config)


@model
def gptj():
    config = transformers.GPTJConfig(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=4, rotary_dim=2)
    return text(transformers.GPTJForCausalLM, config)


@model
def gpt_neox():
    return text(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**tiny()))


@model
def llama():
    return text(transformers.LlamaForCausalLM, transformers.LlamaConfig(**tiny(num_key_value_heads=2)))


@model
def mistral():
    return text(transformers.MistralForCausalLM, transformers.MistralConfig(**tiny(num_key_value_heads=2, sliding_window=3)))


@model
def qwen2():
    return text(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**tiny(num_key_value_heads=2)))


@model
def qwen3():
    return text(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**tiny(num_key_value_heads=2, head_dim=4)))


@model
def gemma():
    return text(transformers.GemmaForCausalLM, transformers.GemmaConfig(**tiny(num_key_value_heads=2, head_dim=4)))


@model
def phi():
    return text(transformers.PhiForCausalLM, transformers.PhiConfig(**tiny(partial_rotary_factor=0.5)))


@model
def opt():
    config = transformers.OPTConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, ffn_dim=32, num_attention_heads=4,
                                    max_position_embeddings=16, word_embed_proj_dim=16)
    return text(transformers.OPTForCausalLM, config)


@model
def bloom():
    return text(transformers.BloomForCausalLM, transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=2, n_head=4))


@model
def falcon():
    return text(transformers.FalconForCausalLM, transformers.FalconConfig(**tiny(), attn_implementation="eager"))


@model
def mixtral():
    config = transformers.MixtralConfig(**tiny(num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2))
    return text(transformers.MixtralForCausalLM, config)


@model
def mamba():
    config = transformers.MambaConfig(vocab_size=20, hidden_size=8, state_size=4, num_hidden_layers=2, time_step_rank=2)
    return text(transformers.MambaForCausalLM, config)


def two_texts(model, source, target):
    return model(input_ids=source, decoder_input_ids=target)


@model
def t5():
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return text(transformers.T5ForConditionalGeneration, config, two_texts, (ids(6), ids(4)))


@model
def bart():
    config = transformers.BartConfig(vocab_size=20, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                     decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16)
    return text(transformers.BartForConditionalGeneration, config, two_texts, (ids(6), ids(4)))


@model
def clip_text_and_image():
    config = transformers.CLIPConfig(
        text_config=tiny(), vision_config=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                                               image_size=16, patch_size=8), projection_dim=8)
    call = lambda model, words, pixels: model(input_ids=words, pixel_values=pixels)
    return text(transformers.CLIPModel, config, call, (ids(), image(16)), ("logits_per_image", "text_embeds", "image_embeds"))


@model
def vit():
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=24,
                                    patch_size=8, num_labels=CLASSES)
    return text(transformers.ViTForImageClassification, config, inputs=image(24))


@model
def whisper():
    config = transformers.WhisperConfig(vocab_size=20, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
                                        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
                                        max_source_positions=8, max_target_positions=16, pad_token_id=0, bos_token_id=1,
                                        eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None)
    call = lambda model, sound, words: model(input_features=sound, decoder_input_ids=words)
    return text(transformers.WhisperForConditionalGeneration, config, call, (torch.randn(BATCH, 8, 16), ids(4)))


@model
def wav2vec2():
    config = transformers.Wav2Vec2Config(**tiny(conv_dim=(8, 8), conv_kernel=(4, 3), conv_stride=(2, 2), num_conv_pos_embeddings=4,
                                                num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0))
    return text(transformers.Wav2Vec2ForCTC, config, inputs=torch.randn(BATCH, 64))


def without_draws(module):
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, torchvision.ops.StochasticDepth):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


@contextlib.contextmanager
def all_float64():
    """Many models compute norms, rotations or scores in float32 whatever their own type: here in float64 too."""
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64):
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield


@all_float64()
def traced(name):
    torch.manual_seed(7)
    module, inputs = MODELS[name]()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    without_draws(module.double())
    # Biases and weights that begin at 0 or 1 would hide errors in their use.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return torch.jit.trace(module, inputs, check_trace=False), list(inputs)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[2:] or MODELS:
        module, inputs = traced(name)
        module.save(folder / f"{name}.pt")
        torch.save(inputs, folder / f"{name}.inputs")


if __name__ == "__main__":
    main()
