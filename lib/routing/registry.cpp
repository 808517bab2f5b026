#include <array>

#include "routing/method.h"
#include "routing/noisy_top_k.h"
#include "routing/protocol.h"
#include "routing/smear.h"

namespace mergex::routing {
namespace {

constexpr std::array kMethods{&kCamex, &kSoftMerge, &kSmoe};
constexpr std::array kProtocols{&kDomainSpecific, &kTies, &kDare};
constexpr std::array kRouters{&kNoisyTopK, &kSmear};

}  // namespace

std::span<const Method* const> method_registry() { return kMethods; }
std::span<const Protocol* const> protocol_registry() { return kProtocols; }
std::span<const RouterKind* const> router_registry() { return kRouters; }

}  // namespace mergex::routing
