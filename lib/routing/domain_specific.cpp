#include "routing/protocol.h"

namespace mergex::routing {

constinit const Protocol kDomainSpecific{
    .name = "domain_specific",
    .summary = "base plus the score-weighted task vectors, unmasked; at alpha 1 the soft merge of the experts",
    .paper = "Nguyen et al. 2025, section 2 (arXiv:2502.18821)",
    .configure = [](io::JsonObject&, Profile) -> Masks { return {}; }};

}  // namespace mergex::routing
