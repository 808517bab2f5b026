#pragma once

// Catch2's header, included in one way everywhere.
#include <catch2/catch.hpp>
