"""A small language model of the Python standard library's own functions: minutes on two cores."""

from ml_collections import ConfigDict, config_dict

from pipeline.registry import list_options


def get_config() -> ConfigDict:
    """The configuration that `python train.py` runs."""
    config = ConfigDict()
    config.seed = 0
    config.steps = 150

    # The records come from one of two: `source`, MODULE:NAME of a function or class that takes
    # `split`; or `files`, a name or glob, or a tuple of them.
    config.train = ConfigDict({"source": "configs.python_data:Functions", "split": "train"})
    config.eval = ConfigDict({"source": "configs.python_data:Functions", "split": "validation"})
    for part in (config.train, config.eval):
        part.files = config_dict.FieldReference("", field_type=object)
        part.kind = ""  # of files: "text", "jsonl", …; "" to tell it from their extensions
        # For `files` with tokens of another program, which are read in place: "megatron", "flat",
        # "arrow", …, a method of `pipeline.InPlace`; and the options of that method.
        part.format = ""
        part.options = ConfigDict()
        part.options.marks = config_dict.placeholder(object)
        for name in list_options("records", "tokens"):
            part.options[name] = config_dict.placeholder(object)
        part.options.vocab_size = config_dict.placeholder(int)
        part.field = "text"  # of a record
    # Instead of the records of `eval`, the share of the training corpus that is held out for
    # evaluation; 0: none.
    config.hold_out = config_dict.placeholder(float)
    # The field of a record that names what it is of, such as its conversation, file or author:
    # records with one value are held out together. None: each record by itself.
    config.hold_out_by = config_dict.placeholder(str)

    # The text of a record. kind: "" (all of `field`), "answer" (`templates.Answer`), "chat"
    # (`templates.Chat`), or "preference" (`templates.Preference`). A field that is None has the
    # default of its class.
    config.template = ConfigDict({"kind": ""})
    for name, kind in list_options("templates").items():
        simple = kind in (str, bool)  # others are a list, texts by field, or a template
        config.template[name] = config_dict.placeholder(kind if simple else object)
    # At a record that fails: "raise" ends the work, "skip" lists it in skipped.jsonl. `strict`
    # refuses text that the tokenizer changes, which is otherwise counted.
    config.prepare = ConfigDict({"on_error": "raise", "strict": False})

    # kind: "causal" (also pairs, if `field` names two), "masked" (`pipeline.Masked`) or
    # "fill_in_the_middle" (`pipeline.FillInTheMiddle`). Again, None is the default of the class.
    config.task = ConfigDict({"kind": "causal"})
    config.task.rate = config_dict.placeholder(float)
    for name in ("mask_id", "prefix", "middle", "suffix"):
        config.task[name] = config_dict.placeholder(int)
    for name in ("mode", "loss"):
        config.task[name] = config_dict.placeholder(str)
    for name in ("keep_ids", "marks"):
        config.task[name] = config_dict.placeholder(tuple)

    # kind: "sentencepiece", "huggingface" (`model` is a tokenizer.json) or "bytes". Without
    # `model`, a sentencepiece model is trained on the training text.
    config.tokenizer = ConfigDict({"kind": "sentencepiece", "model": "", "vocab_size": 2048})
    config.tokenizer.begin = config.tokenizer.end = True  # mark where documents begin and end
    # The tokens that mark it, such as "<s>"; "": those that the tokenizer itself adds.
    config.tokenizer.begin_token = config.tokenizer.end_token = ""

    # Options of `fit_buckets` and `Plan`, as `pipeline.load` takes them. Buckets are fitted for
    # dense attention in a model of `config.model.width`; with attention="segment" one is enough.
    config.batches = ConfigDict({"tokens_per_batch": 4096, "max_buckets": 4, "max_length": 1024})
    # Lengths of rows are multiples of this. Not given: of 128, or of less if that saves padding.
    config.batches.length_multiple = config_dict.placeholder(int)
    # The number of rows is a multiple of this: give a multiple of every number of devices that the
    # run may continue on. Not given: of the number that it begins with.
    config.batches.row_multiple = config_dict.placeholder(int)
    # Steps whose rows are sorted, so that the rows of a batch cost the same. Not given:
    # `accumulate`, if attention skips other segments and devices then wait less; or 1.
    config.batches.tiers = config_dict.placeholder(int)
    # "short_first": short buckets come first, in each of `cycles` parts of an epoch. Not given:
    # buckets are spread evenly.
    config.batches.curriculum = config_dict.placeholder(str)
    config.batches.cycles = config_dict.placeholder(int)
    # For many machines and a corpus in object storage: shares of each window, of which a machine
    # reads some, as docs/scale.md says. Not given: 1, and each machine reads all.
    config.batches.read_shares = config_dict.placeholder(int)
    config.batches.packing = "best_fit"
    # Segments begin at multiples of this. Not given: anywhere.
    config.batches.align = config_dict.placeholder(int)
    config.batches.overflow = "split"

    # For corpora in object storage: a local directory for their parts, and the most bytes of each
    # corpus there. Not given: in the directory of the user's caches; 20 GB.
    config.cache = ConfigDict({"directory": config_dict.placeholder(str)})
    config.cache.bytes = config_dict.placeholder(int)
    config.num_threads = 1  # that build batches; more for files that are decoded

    # Changes at a step, of fields of `batches`, `seed`, or `exclude`, numbers of documents:
    # ((2_000, {"tokens_per_batch": 8192}), (9_000, {"max_length": 4096})). All shapes are compiled
    # before step 0.
    config.schedule = ()
    # Steps between looks at WORKDIR/weights.json, whose weights a mixture then takes; 0: never.
    config.weights_every = 100
    # Another run's work directory, to begin with its latest parameters; "": random ones.
    config.start_from = ""

    # "decoder"; "encoder", for the task "masked"; "encoder_decoder", for pairs; or
    # "vision_decoder", for text with patches (configs/vision.py).
    config.architecture = "decoder"
    # Fields of `TransformerConfig`.
    config.model = ConfigDict({"num_layers": 4, "width": 128, "num_heads": 4, "num_kv_heads": 2})
    config.model.mlp_width = 384
    config.batches.width = config.model.get_ref("width")
    config.model.dtype = "auto"  # float32 on CPUs, else bfloat16; or either, or "float16"
    config.model.attention = "auto"
    config.model.remat = False  # compute each layer again in the backward pass, to save memory
    config.model.scan_layers = False  # compile one layer for all

    config.optimizer = ConfigDict({"learning_rate": 4e-3})
    # The learning rate rises over `warmup_steps`, a tenth of `decay_steps` if not given, and falls
    # along a cosine until `decay_steps`, the steps that the run begins with if not given.
    config.optimizer.warmup_steps = config_dict.placeholder(int)
    config.optimizer.decay_steps = config_dict.placeholder(int)
    config.optimizer.final = 0.05  # learning rate after `decay_steps`, as a share of the highest
    config.optimizer.weight_decay = 0.1  # on matrices only
    config.optimizer.clip = 1.0  # global norm of gradients
    config.optimizer.b1, config.optimizer.b2 = 0.9, 0.98

    config.optimizer.loss_scale = 2.0**15  # the initial one; only for float16

    # Devices along each axis; -1: all that are left. `context` divides the length of rows.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "context": 1, "tensor": 1})
    # Or divide rows of each shape over as many devices of `data` and `fsdp` as their number needs.
    config.dynamic_context = False
    config.context_order = "contiguous"  # or "zigzag", "striped": parts of a row cost the same

    # Parts of each batch that are computed one after another. Not given: for each bucket as few as
    # fit the memory.
    config.microbatches = config_dict.placeholder(int)
    config.memory_budget = 0  # bytes per device; 0: the memory that the device reports

    config.accumulate = 1  # steps whose gradients are added up for one update

    config.eval_every = 75  # steps
    config.eval_batches = config_dict.placeholder(int)  # the first ones; not given: all
    config.checkpoint_every = 50  # steps
    config.keep = 3  # checkpoints
    config.on_nonfinite = "stop"  # or "skip": continue without that step's update
    config.peak_flops = 0.0  # FLOP/s of a device, for its utilisation; 0: from a table
    config.segment_losses = True  # record the loss of each document
    config.skip_steps = ()  # steps whose batch is left out
    return config
